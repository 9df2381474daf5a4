"""The models that learn, and the reference: DeepSpeed ranks, what they minimize, and what they save."""
