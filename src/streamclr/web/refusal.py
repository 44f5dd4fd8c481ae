"""The page that a person sees instead of one that the server does not give: what is wrong, and what to do."""

import base64
import hashlib

from starlette.responses import HTMLResponse

STYLE = """
body { margin: 12vh auto; padding: 0 1.25rem; max-width: 38rem; font: 17px/1.55 system-ui, sans-serif;
  background: #f5f5f2; color: #1e2226 }
h1 { font-size: 1.35rem; line-height: 1.3 } li { margin: .6rem 0 } .detail { color: #5b636b; font-size: .87rem }
code { font: .9em ui-monospace, monospace; background: #e7eff6; padding: .1em .35em; border-radius: 4px }
@media (prefers-color-scheme: dark) {
  body { background: #131619; color: #e4e7ea } code { background: #1f2d3a } .detail { color: #a3acb4 }
}
"""
# No other file of the server is given without the token, so that the page has its style in itself.
STYLE_SHA256 = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{STYLE_SHA256}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

# Title, why, and what to do, by status.
ADVICE: dict[int, tuple[str, str, tuple[str, ...]]] = {
    401: (
        "This address needs a token, or a new one",
        "Each start of the server makes a new token, which is in the address that it prints. A bookmark, or a page "
        "that was left open, has none or that of an earlier start.",
        (
            "Look at the terminal where the server runs, or at its log. There is a line that begins with "
            "<code>open http://</code>. Open that address: from then on this browser is known, until the next start.",
            "Is the line gone? Start the dashboard again with <code>streamclr serve RUN</code>, or the labelling page "
            "with <code>streamclr label RUN</code>. It prints a new address.",
        ),
    ),
    403: (
        "Opened from another site",
        "So that no other site can use this server in your name, a link there does not open it.",
        ("Copy the address into the address bar of the browser, or open a bookmark.",),
    ),
    421: (
        "The server does not know this host name",
        "It answers under the names that it was told, so that no other site can reach it through a name of its own.",
        (
            "Open the address that the server printed.",
            "To use this name, start it again with <code>--allow-host NAME</code>.",
        ),
    ),
}


def refusal(status: int, detail: str) -> HTMLResponse:
    """detail: a line of the server's own; nothing that the request had in it."""
    title, why, steps = ADVICE.get(status, ("The server refuses this request", "", ()))
    listed = "".join(f"<li>{step}</li>" for step in steps)
    content = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>StreamCLR: {title}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>'
        f'<h1>{title}</h1><p>{why}</p><ol>{listed}</ol><p class="detail">{status}: {detail}</p></main></body></html>'
    )
    return HTMLResponse(content, status, {"content-security-policy": POLICY})
