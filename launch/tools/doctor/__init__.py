"""`rlsys doctor`: checks this machine, and with a configuration also that engines and policy agree.

facts ─▶ software_checks, system_checks ─▶ results        agreement: log-probs of engines and policy
"""
