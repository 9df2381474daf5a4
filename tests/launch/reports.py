"""What tests of the report share: they write one, and read what is in it."""

import base64
import gzip
import io
import json
import re

from rich.console import Console

from launch.tools.report.command import ReportOptions, write_report
from launch.tools.report.gather import ReportedRun, page_data


def decompress(piece: bytes):
    return json.loads(gzip.decompress(piece))


def read_pieces(target) -> dict:
    """Returns the pieces inside a page."""
    pieces = re.findall(r'<script type="text/plain" id="piece-([^"]+)">([^<]*)</script>', target.read_text())
    return {name: decompress(base64.b64decode(text)) for name, text in pieces}


def run_report(*runs, **wanted) -> str:
    out = io.StringIO()
    write_report(ReportOptions(tuple(map(str, runs)), **wanted), Console(file=out, width=300))
    return out.getvalue()


def report_data(run) -> dict:
    [data] = page_data([ReportedRun.read(run)])["runs"]
    return data


def make_report(run, **wanted):
    """Writes the report of one run or several, and returns its file."""
    runs = run if isinstance(run, list) else [run]
    target = runs[0].parent / f"{runs[0].name}.html"
    write_report(ReportOptions(tuple(map(str, runs)), out=str(target), **wanted), Console(quiet=True))
    return target
