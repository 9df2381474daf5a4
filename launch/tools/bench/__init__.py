"""`rlsys bench`: a configuration's own loop on synthetic prompts, and where the time of its steps goes.

The loop is the real one, with all its workers; prompts, lengths and rewards are `launch/tools/synthetic.py`. Nothing is evaluated or saved.

what is wanted ─▶ command ─▶ the run's own files ─▶ figures ─▶ shown
"""
