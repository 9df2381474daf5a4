"""The page of a run: curves, findings, time, samples, settings. Written to a file, or served while the run goes on.

run directory ─▶ gather, charts, lanes, sample_pieces ─▶ compressed JSON ─┬─▶ command.py: inside report.html
                                                                          └─▶ watch.py: fetched every two seconds
page.html, style.css and the scripts show the data; they are the same in both.
"""
