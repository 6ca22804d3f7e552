"""The documentation site: it builds without a warning, and its API page has every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = {page.name for page in (ROOT / "docs").glob("*.md")}

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", ".mkdocs.yml", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_navigation():
    assert set(re.findall(r"^  - .*: (\w+\.md)$", (ROOT / ".mkdocs.yml").read_text(), re.M)) == PAGES


@pytest.mark.parametrize("package", ["blockmgr", "blockmgr_kernels", "blockmgr_fuzz"])
def test_the_api_page_has_every_public_name(site, package):
    described = set(re.findall(r'id="([\w.]+)"', (site / "api.html").read_text()))
    names = {name.rsplit(".", 1)[-1] for name in described if name.startswith(f"{package}.")}
    missing = set(importlib.import_module(package).__all__) - names
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_out_of_the_root_pages_exist(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
