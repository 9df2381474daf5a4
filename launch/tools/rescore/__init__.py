"""`rlsys rescore`: judges saved samples with another reward. It needs reward processes only, no Ray and no model.

inputs ─▶ samples/*.parquet ─▶ reward processes ─▶ output: old and new rewards side by side, and in --out
"""
