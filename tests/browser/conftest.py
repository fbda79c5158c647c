"""One JupyterLab server and one Chromium for the browser tests of a module.

The server is the installed ``jupyter lab`` with folders of its own: it sees copies of the notebooks, this
checkout on ``PYTHONPATH``, and nothing of the user's settings. A test opens a chapter in a fresh page.
They end with the module: Playwright keeps an event loop running in the thread, in which later tests could
not call ``asyncio.run``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
SERVER_SECONDS = 90
RUN_SECONDS = 300
# Chapters say these words when a widget could not be drawn.
BROKEN_WIDGET = re.compile(
    r"Error displaying widget|Loading widget|Error creating widget|model not found", re.I
)
ABOUT_WIDGETS = re.compile(r"widget|jupyter-widgets|comm ", re.I)


@pytest.fixture(scope="module")
def chromium() -> str:
    """Path of an installed Chromium."""
    found = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if found is None:
        pytest.skip("needs the package `chromium` (Debian, Ubuntu: apt-get install chromium)")
    return found


@dataclass(frozen=True)
class Server:
    """A running JupyterLab."""

    url: str
    token: str

    def address(self, notebook: str) -> str:
        """Where JupyterLab opens ``notebook``, with no tabs left over from another test."""
        return f"{self.url}lab/tree/{notebook}?reset&token={self.token}"


@pytest.fixture(scope="module")
def lab_server(chromium: str, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab on a free port of this machine, with folders of its own."""
    home = tmp_path_factory.mktemp("lab")
    work = home / "notebooks"
    shutil.copytree(checkout / "notebooks", work, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    config = home / "config"
    # The news banner asks a site on the net.
    quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    _write_json(config / "labconfig" / "page_config.json", quiet)
    folders = {
        "JUPYTER_CONFIG_DIR": config,
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": config / "lab" / "user-settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
        "LABKIT_STATE": home / "state",
        "LABKIT_RESULTS": home / "results",
        "PYTHONPATH": checkout,
    }
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--notebook-dir={work}"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}"]
    with open(home / "server.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **{name: str(path) for name, path in folders.items()}},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=work,
            start_new_session=True,  # Ctrl-C ends the tests; the server is ended below
        )
    try:
        yield Server(_wait_for_server(process, home), token)
    finally:
        process.terminate()  # it ends its kernels
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def _wait_for_server(process: subprocess.Popen[bytes], home: Path) -> str:
    """The server's address, taken from the file in which it announces its port."""
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for announced in (home / "runtime").glob("jpserver-*.json"):
            try:
                url: str = json.loads(announced.read_text(encoding="utf-8"))["url"]
                with urlopen(f"{url}api", timeout=5):
                    return url
            except (OSError, ValueError, KeyError):
                continue  # half written, or not listening yet
        time.sleep(0.1)
    log = (home / "server.log").read_text(encoding="utf-8", errors="replace")
    pytest.fail(f"JupyterLab did not start in {SERVER_SECONDS} s:\n{log[-3000:]}")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """One headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM_FLAGS))
        yield running
        running.close()


@dataclass
class Chapter:
    """A chapter open in JupyterLab: run it, look at it, move its widgets."""

    page: Any
    name: str
    code_cells: int
    console: list[str] = field(default_factory=list)

    def run_all(self) -> None:
        """Run > Run All Cells, and wait until every code cell has a number.

        Cells with stored outputs have one from the start, the others only when they ran.
        """
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
        self._start_run()
        # A failed cell ends the run: the cells after it never get a number.
        script = """count => {
            if (document.querySelector('[data-mime-type="application/vnd.jupyter.error"]')) return true;
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
            return prompts.filter(p => /\\[\\d+\\]/.test(p.textContent)).length >= count;
        }"""
        self.page.wait_for_function(script, arg=self.code_cells, timeout=RUN_SECONDS * 1000, polling=200)
        assert self.errors() == []

    def _start_run(self) -> None:
        """Choose the menu entry until the first cell is taken up.

        JupyterLab shows "Idle" a moment before it can run cells; until then it ignores the entry, or asks
        which kernel to take.
        """
        started = "() => /\\[[*\\d]/.test(document.querySelector('.jp-CodeCell .jp-InputPrompt').textContent)"
        dialog = self.page.locator(".jp-Dialog button.jp-mod-accept")
        for _ in range(10):
            if dialog.count():
                dialog.first.click()
            self.page.locator('.lm-MenuBar-itemLabel:text-is("Run")').click()
            self.page.locator('.lm-Menu-itemLabel:text-is("Run All Cells")').click()
            for _ in range(15):
                if self.page.evaluate(started):
                    return
                if dialog.count():
                    break
                self.page.wait_for_timeout(200)
        pytest.fail(f"{self.name}: JupyterLab does not run the cells")

    def errors(self) -> list[str]:
        """Everything that went wrong on the page: failed cells, text on stderr, broken or stray widgets."""
        found = [f"{self.name}: {text}" for text in self.console]
        for kind in ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr"):
            found += self.page.locator(f'[data-mime-type="{kind}"]').all_inner_texts()
        if self.page.locator(".jupyter-widgets-output-area").count():
            found.append("an Output widget is on the page")
        outputs = self.page.locator(".jp-OutputArea-output").all_inner_texts()
        return found + [text for text in outputs if BROKEN_WIDGET.search(text)]

    def picture(self) -> Any:
        """The HTML widget that a view redraws."""
        return self.page.locator(".labkit-widget").last

    def widget_text(self) -> str:
        """The text in the widget's picture, as the browser holds it."""
        return self.picture().evaluate("node => node.textContent")

    def text_of(self, html: str) -> str:
        """The text that the browser makes of ``html``: what :meth:`widget_text` gives once it is drawn."""
        script = (
            "html => { const d = document.createElement('div'); d.innerHTML = html; return d.textContent; }"
        )
        return self.page.evaluate(script, html)

    def input(self, label: str) -> Any:
        """The handle of the slider, or the drop-down, called ``label``."""
        name = self.page.locator(".widget-label").filter(has_text=re.compile(f"^{re.escape(label)}$")).last
        return name.locator("xpath=..").locator(".noUi-handle, select").first

    def press(self, label: str, key: str) -> None:
        """Give the keyboard focus to the slider called ``label``, and press a key."""
        handle = self.input(label)
        handle.scroll_into_view_if_needed()
        handle.focus()
        self.page.keyboard.press(key)

    def choose(self, label: str, option: str) -> None:
        """Choose an entry of a drop-down (which keys open it differs between systems)."""
        self.input(label).select_option(label=option)

    def wait_for_text(self, wanted: str) -> None:
        """Wait until the widget shows exactly the text ``wanted``."""
        script = """wanted => {
            const all = document.querySelectorAll('.labkit-widget');
            return all.length > 0 && all[all.length - 1].textContent === wanted;
        }"""
        try:
            self.page.wait_for_function(script, arg=wanted, timeout=15_000, polling=100)
        except Exception:
            assert self.widget_text() == wanted  # the message shows both texts
            raise

    def wait_for_change(self, before: str) -> str:
        """Wait until the widget shows something other than ``before``; the new text."""
        script = """before => {
            const all = document.querySelectorAll('.labkit-widget');
            return all.length > 0 && all[all.length - 1].textContent !== before;
        }"""
        self.page.wait_for_function(script, arg=before, timeout=15_000, polling=100)
        return self.widget_text()


@pytest.fixture
def open_chapter(browser: Any, lab_server: Server, checkout: Path, tmp_path: Path) -> Iterator[Any]:
    """``open_chapter("02_packing_w4_w3.ipynb")`` gives a :class:`Chapter` that has been run.

    A screenshot of the widget and of the whole page is left in ``tmp_path``.
    """
    opened: list[Chapter] = []

    def start(name: str) -> Chapter:
        book = json.loads((checkout / "notebooks" / name).read_text(encoding="utf-8"))
        code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        # a cell whose input is hidden shows no number
        count = sum(not cell["metadata"].get("jupyter", {}).get("source_hidden") for cell in code)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        chapter = Chapter(page, name, count)
        page.on("pageerror", lambda error: chapter.console.append(f"page error: {error}"))
        page.on("console", lambda message: _keep(chapter.console, message))
        opened.append(chapter)
        page.goto(lab_server.address(name), wait_until="domcontentloaded")
        chapter.run_all()
        chapter.picture().wait_for(timeout=30_000)
        return chapter

    yield start
    for chapter in opened:
        stem = chapter.name.removesuffix(".ipynb")
        if chapter.picture().count():
            chapter.picture().scroll_into_view_if_needed()
        chapter.page.screenshot(path=tmp_path / f"{stem}.png")
        chapter.page.close()


def _keep(console: list[str], message: Any) -> None:
    """Collect console errors that are about widgets; JupyterLab itself logs others that mean nothing here."""
    if message.type == "error" and ABOUT_WIDGETS.search(message.text):
        console.append(f"console: {message.text}")
