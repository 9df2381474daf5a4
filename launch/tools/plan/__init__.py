"""`rlsys plan`: memory, disk and time of a configuration before anything is started, on a cluster that need not exist.

configuration, cluster ─▶ launch/tools/fitting ─▶ drawing, report    who runs where, and how full each device is
                                      └──▶ suggestions         what to change if it does not fit
costs of a run ─▶ simulate ─▶ variants                         how fast other lags and placements would be
"""
