"""What a configuration would take, before anything is started: memory, disk and time, on a cluster that need not be there.

configuration, cluster ─▶ laying ─▶ fit ─▶ drawing       who lies where, and how full it is
                                     └──▶ remedies      what to change where it does not fit
costs of a run ─▶ simulate ─▶ ways                      how fast other lags and placements would be
"""
