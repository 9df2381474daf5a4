"""A model behind the interfaces of OpenAI and Anthropic. The front knows no engine: see `model.py`."""
