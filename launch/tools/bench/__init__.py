"""`rlsys bench`: runs a configuration's own loop on synthetic prompts, and reports where the time of its steps goes.

The loop is the real one, with all its workers. `launch/tools/synthetic.py` makes prompts, lengths and rewards. Nothing
is evaluated or saved.

options ─▶ command ─▶ the run's own files ─▶ figures ─▶ report
"""
