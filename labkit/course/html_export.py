"""Pages of a run: one for each chapter (nbconvert's lab look) and an index; nothing from the network."""

from __future__ import annotations

import copy
import html
import re
import warnings
from typing import Any

from labkit.course.index import all_chapters
from labkit.course.notebook import Notebook

WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
_WIDGET_NOTE = (
    "<p style='border:1px dashed #9aa4b2;padding:.5em .8em;color:#5a6472'>"
    "A widget stands here in JupyterLab; the figure beside it shows the same.</p>"
)
# The lab look without the scripts that it would fetch from a CDN.
_TEMPLATE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}
<style>
main { max-width: 1000px; margin: 0 auto; padding: 0 1rem 4rem; }
.lk-back { font: 14px system-ui, sans-serif; margin: 1rem 0; }
.lk-back a { color: #1f6feb; text-decoration: underline; }
</style>
{%- endblock -%}
{%- block body_header -%}{{ super() }}
<p class="lk-back"><a href="index.html">Course map</a></p>
{%- endblock -%}
"""


def page(book: Notebook, title: str) -> str:
    """One executed notebook as a page that works from a file, with no network."""
    import nbformat

    shown = copy.deepcopy(book)
    shown["metadata"]["title"] = title
    for cell in shown["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(WIDGET_TYPE, None) is not None and "text/html" not in data:
                data["text/html"] = _WIDGET_NOTE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbconvert.exporters import HTMLExporter

        exporter = HTMLExporter(raw_template=_TEMPLATE)
        exporter.anchor_link_text = ""
        text, _ = exporter.from_notebook_node(nbformat.from_dict(shown))
    # the chapters lie beside each other here as well, as pages
    return re.sub(r'(href=["\'](?:\./)?\d\d_\w+)\.ipynb(["\'#])', r"\1.html\2", str(text))


_STYLE = """
:root { color-scheme: light dark;
  --ink:#1c2430; --soft:#5a6472; --line:#dfe4ea; --paper:#fff; --card:#f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink:#e6e9ee; --soft:#9aa4b2; --line:#303844; --paper:#12161c; --card:#1a2029; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.5 system-ui, sans-serif; }
main { max-width:1080px; margin:0 auto; padding:2.5rem 1.25rem 4rem; }
h1 { font-size:1.9rem; line-height:1.2; margin:0 0 .3rem; }
p.lead { color:var(--soft); margin:0 0 1.6rem; }
table { border-collapse:collapse; width:100%; }
th { text-align:left; font-size:.8rem; color:var(--soft); font-weight:600; }
th, td { padding:.6rem .7rem; border-bottom:1px solid var(--line); vertical-align:top; }
td.num { font-variant-numeric:tabular-nums; white-space:nowrap; }
tr.coming td { color:var(--soft); }
a { color:#1f6feb; text-underline-offset:2px; } @media (prefers-color-scheme: dark) { a { color:#79b0ff; } }
.title { font-weight:600; } .q { color:var(--soft); font-size:.92rem; }
.s { display:inline-block; padding:.05rem .5rem; border-radius:4px; font-size:.85rem; font-weight:600; }
.s.passed { background:#dcf3e4; color:#12562c; } .s.failed { background:#fde3e0; color:#8e1b10; }
.s.interrupted { background:#fff0cc; color:#6b4a00; } .s.coming, .s.not { font-weight:400; padding-left:0; }
pre { background:var(--card); padding:.7rem; font-size:.85rem; margin:0; white-space:pre-wrap; }
.wide { overflow-x:auto; }
"""


def index(entries: dict[str, dict[str, Any]]) -> str:
    """The page that lists every chapter with its latest result in this folder.

    Args:
        entries: chapter number -> its entry of ``summary.json``.
    """
    statuses = [entry.get("status") for entry in entries.values()]
    lead = f"{statuses.count('passed')} of {len(statuses)} chapters that ran passed"
    seconds = sum(float(entry.get("seconds") or 0) for entry in entries.values())
    lead += f", in {seconds:.0f} seconds of running time (measured on this machine)."
    rows = "".join(_row(chapter, entries.get(chapter.number)) for chapter in all_chapters())
    heads = "".join(
        f"<th scope='col'>{h}</th>" for h in ("No", "Chapter", "Result", "Exercises", "Time", "Device")
    )
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>labkit course</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>Low-bit LLM inference on small GPUs</h1><p class='lead'>{lead}</p>"
        f"<div class='wide'><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        "</main></body></html>\n"
    )


def _row(chapter: Any, entry: dict[str, Any] | None) -> str:
    title, question = html.escape(chapter.title), html.escape(chapter.question)
    if entry is None:
        word = "not run here" if chapter.notebook() is not None else "coming"
        body = f"<span class='title'>{title}</span><div class='q'>{question}</div>"
        return _tr(
            "coming", chapter.number, body, f"<span class='s {word.split()[0]}'>{word}</span>", "", "", ""
        )
    link, book = html.escape(str(entry.get("html") or "")), html.escape(str(entry.get("notebook") or ""))
    body = f"<a class='title' href='{link}'>{title}</a>" if link else f"<span class='title'>{title}</span>"
    body += f" <a class='q' href='{book}'>notebook</a>" if book else ""
    body += f"<div class='q'>{question}</div>"
    status = str(entry.get("status"))
    result = f"<span class='s {html.escape(status)}'>{html.escape(status)}</span>"
    time = f"{float(entry.get('seconds') or 0):.1f} s"
    device = html.escape(str(entry.get("device") or ""))
    row = _tr("", chapter.number, body, result, checks_line(entry.get("checks") or {}), time, device)
    return row + _failure(entry)


def checks_line(checks: dict[str, int]) -> str:
    """Such as ``2 of 5 passed``; ``5 open`` when nobody has tried any, "" without exercises."""
    total = checks.get("total", 0)
    if not total:
        return ""
    return f"{total} open" if checks["not_attempted"] == total else f"{checks['passed']} of {total} passed"


def _failure(entry: dict[str, Any]) -> str:
    failure = entry.get("failure")
    if not failure:
        return ""
    number = failure["code_cell"]
    where = f"code cell {number} of {failure['of']}" if number else "outside the cells"
    head = f"{where}: {failure['error']}: {failure['message']}"
    text = html.escape(f"{head}\n\n{failure['source']}")
    return f"<tr><td></td><td colspan='5'><pre>{text}</pre></td></tr>"


def _tr(kind: str, number: str, body: str, result: str, checks: str, time: str, device: str) -> str:
    cells = [f"<td class='num'>{number}</td>", f"<td>{body}</td>", f"<td>{result}</td>"]
    cells += [f"<td class='num'>{value}</td>" for value in (checks, time, device)]
    return f"<tr class='{kind}'>{''.join(cells)}</tr>"
