"""From prompts to judged batches: sampling plans, dynamic sampling, over-sampling, early scoring."""
