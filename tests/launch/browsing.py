"""What tests of the page share: they read it, and search in it."""

import json
import time

HOSTILE = (
    "</script><img src=x onerror=\"document.title='caught'\">\x00\x1b[31m\u202eright to left\u202c 😀 &lt;b&gt; مرحبا"
)


def expect(locator):
    """Playwright's own, imported late: it may not be installed."""
    from playwright import sync_api

    return sync_api.expect(locator)


def wait_for_text(page, where: str, text: str) -> None:
    """Waits until an element has the text."""
    expect(page.locator(where)).to_contain_text(text, timeout=10_000)


def result_text(page) -> str:
    return page.locator("#found").inner_text()


def rows(page) -> list[str]:
    return [row.inner_text().replace("\n", " ") for row in page.locator(".list .row").all()]


def search(page, **values) -> str:
    """Fills in the filters, and returns the text of the result."""
    for name, value in values.items():
        field = page.locator(f'.filters [name="{name}"]')
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        answered = json.loads(page.locator("#found").get_attribute("data-filter"))
        if all(answered[name] == value for name, value in values.items()):
            return result_text(page)
        page.wait_for_timeout(20)
    raise AssertionError(f"no answer to {values}")
