"""DeepSpeed ranks: policy and critic, and the reference; what they minimise and what they save."""
