"""The page as one text: styles, scripts and data, and a policy by which nothing else may run or be loaded."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = (
    "dom.js",
    "store.js",
    "axis.js",
    "curves.js",
    "phases.js",
    "lanes.js",
    "findings.js",
    "search.js",
    "tokens.js",
    "conversation.js",
    "group.js",
    "samples.js",
    "settings.js",
    "main.js",
)
IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)


def build_page(title: str, pieces: Mapping[str, bytes], live: bool = False) -> str:
    """Builds the page with compressed `pieces` by name. A live page has none: it asks its server for them."""
    script = "\n".join(inline_script((HERE / name).read_text()) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = "\n".join(
        f'<script type="text/plain" id="piece-{html.escape(name)}">{base64.b64encode(piece).decode()}</script>'
        for name, piece in pieces.items()
    )
    connect = "'self'" if live else "'none'"
    parts = {
        "TITLE": html.escape(title),
        "POLICY": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'",
        "LIVE": "live" if live else "still",
        "STYLE": (HERE / "style.css").read_text(),
        "DATA": data,
        "SCRIPT": script,
    }
    text = (HERE / "page.html").read_text()
    for name, part in parts.items():
        before, mark, after = text.partition(f"<!--{name}-->")
        if not mark:
            before, mark, after = text.partition(f"%{name}%")
        assert mark, name
        text = before + part + after
    return text


def inline_script(script: str) -> str:
    """Turns a module into a part of the page's single script, in which all top-level names are shared."""
    return re.sub(r"^export ", "", IMPORT.sub("", script), flags=re.MULTILINE)
