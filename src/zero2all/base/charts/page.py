"""A report as one HTML page with everything inside it: no script, no network, ready to attach to an issue."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8881 }
body { font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse; width: 100% } td, th { padding: .25rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) td { background: var(--soft) }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
small { opacity: .75 }
"""


def html_page(title: str, body: str, style: str = "") -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style><body>{body}</body></html>\n"
    )
