"""One page of a run: curves, findings, time, samples, settings. In a file of its own, or served while the run goes on.

run directory ─▶ gather, charts, lanes, sampled ─▶ JSON, compressed ─┬─▶ page.py: inside report.html
                                                                     └─▶ watch.py: asked for by the page, again and again
page.html, style.css and the scripts below show it; they are the same in both.
"""
