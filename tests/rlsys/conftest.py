import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("rlsys", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("rlsys")
