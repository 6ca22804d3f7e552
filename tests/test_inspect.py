"""`blockmgr inspect`: the picture says what the manager holds, the page shows it in a real browser and runs nothing
that came with the data, bad sources end in one line, and the live view draws what the server reports."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from blockmgr_integration import inspect_page, live_view
from blockmgr_integration.async_engine import AsyncEngine, EngineStopped
from blockmgr_integration.commands.inspect import app
from blockmgr_integration.engine import Engine
from blockmgr_integration.inspect_page import Prompt, page, picture
from blockmgr_integration.inspect_sources import read
from blockmgr_integration.options import BadInput
from blockmgr_integration.server import make_app
from PIL import Image
from rich.console import Console

from blockmgr import BlockManager, Namespace, metrics
from blockmgr.namespace import DEFAULT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is not installed")
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
SYSTEM = list(range(160))


def admitted(manager: BlockManager, prompt, namespace: Namespace = DEFAULT, **options):
    seq = manager.admit(prompt, namespace, wait=False, **options)
    assert seq, seq
    manager.commit(seq, len(prompt) - seq.cached)
    return seq


def busy_manager() -> BlockManager:
    """Two namespaces, shared prefixes, a fork, a preempted sequence, a pin, and blocks that wait for a ticket."""
    manager = BlockManager(120, 16)
    evil = Namespace(salt=EVIL)
    seqs = [admitted(manager, SYSTEM + [1000 + i] * (20 + i), request_id=f"chat {i}") for i in range(5)]
    seqs += [admitted(manager, SYSTEM[:80] + [2000 + i] * 40, evil, request_id=f"{EVIL} {i}") for i in range(3)]
    manager.fork(seqs[0])
    manager.preempt(seqs[1])
    manager.free(seqs[2])
    manager.pin(SYSTEM[:64], EVIL)
    manager.open_ticket()
    manager.free(seqs[3])
    return manager


def random_manager(seed: int) -> BlockManager:
    rng = np.random.default_rng(seed)
    manager = BlockManager(60, 4)
    live = []
    for _ in range(150):
        action, space = rng.integers(8), Namespace(salt=int(rng.integers(2)))
        if action < 4 or not live:
            prompt = rng.integers(0, 2, rng.integers(1, 30))
            seq = manager.admit(prompt, space, wait=False)
            if seq:
                manager.commit(seq, int(rng.integers(0, len(prompt) - seq.cached + 1)))
                live.append(seq)
        elif action == 4 and live[-1].live and live[-1].computed == live[-1].known:
            child = manager.fork(live[-1])
            live += [child] if child else []
        elif action == 5 and live[0].live:
            manager.preempt(live[0])
        elif action == 6 and rng.random() < 0.1:
            manager.invalidate(space)
        else:
            manager.free(live.pop(rng.integers(len(live))))
    return manager


def path(shown: dict, run: int, at: int) -> list[int]:
    """The blocks from the root to a place, from the picture alone."""
    ends, found = np.cumsum(shown["runs"]["length"]), []
    while run >= 0:
        start = int(ends[run]) - shown["runs"]["length"][run]
        found = shown["blocks"][start : start + at] + found
        run, at = shown["runs"]["parent"][run], shown["runs"]["at"][run]
    return found


# --- the picture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_tables_leases_and_states_can_be_read_off_the_picture(seed):
    manager = random_manager(seed)
    shown = picture(manager)
    leases = [0] * manager.num_blocks
    live = [seq for seq in manager.sequences.values() if seq.live]
    for seq, drawn in zip(live, shown["sequences"], strict=True):
        table = path(shown, drawn["run"], drawn["at"]) + drawn["tail"]
        assert table == seq.block_table.tolist()
        for block in table:
            leases[block] += 1
    assert leases == shown["leases"]
    pool = manager.pool
    counts = [shown["states"].count(letter) for letter in "fclx"]
    assert counts == [pool.free, pool.cached, pool.leased, pool.fenced]
    manager.check()


def test_the_picture_names_content_pins_and_namespaces():
    manager = busy_manager()
    shown = picture(manager, [Prompt("long", [*SYSTEM, 7, 7]), Prompt("cold", [9] * 40, Namespace(adapter="x"))])
    assert [entry["label"] for entry in shown["namespaces"]] == ["default", f"salt={EVIL!r}"]
    assert shown["preempted"] == 1 and [pin["owner"] for pin in shown["pins"]] == [EVIL]
    assert path(shown, shown["pins"][0]["run"], shown["pins"][0]["at"]) == path(shown, 0, 4)
    tokens = np.frombuffer(base64.b64decode(shown["tokens"]), "<i4").reshape(-1, shown["width"])
    assert tokens[0].tolist() == SYSTEM[:16] and len(tokens) == len(shown["blocks"])
    assert shown["counters"] == metrics.read(manager) and shown["states"].count("x") > 0
    assert [(told["reused"], told["reason"]) for told in shown["explanations"]] == [(160, "whole"), (0, "absent")]


def test_a_namespace_is_labelled_by_type_too():
    manager = BlockManager(8, 4)
    for salt in (1, "1", b"1"):
        admitted(manager, [1, 2, 3, 4, 5], Namespace(salt=salt, extra=(salt,)))
    labels = [entry["label"] for entry in picture(manager)["namespaces"]]
    assert labels == ["salt=1, extra=(1,)", "salt='1', extra=('1',)", "salt=b'1', extra=(b'1',)"]


# --- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["lru", "aged"])
def test_a_snapshot_file_comes_back_as_cached(tmp_path, order):
    manager = BlockManager(64, 16, order=order)
    admitted(manager, SYSTEM)
    np.savez(tmp_path / "snapshot.npz", **manager.snapshot())
    shown, series = read(str(tmp_path / "snapshot.npz"), [Prompt("why", [*SYSTEM[:40], 5, *SYSTEM[40:]])])
    assert series == [] and shown["states"].count("c") == 10 and shown["states"].count("f") == 54
    assert shown["explanations"][0]["text"] == "32 reused, diverged at token 40"


def test_a_recording_and_a_bare_picture_are_read_back(tmp_path):
    shown = picture(busy_manager())
    series = [{"time": 0.5, "free": 1, "cached": 2, "leased": 3, "fenced": 0, "hit_rate": None}]
    (tmp_path / "both.json").write_text(json.dumps({"snapshot": shown, "series": series}))
    (tmp_path / "bare.json").write_text(json.dumps(shown))
    assert read(str(tmp_path / "both.json")) == (shown, series)
    assert read(str(tmp_path / "bare.json")) == (shown, [])


def test_the_command_writes_one_file(tmp_path, capsys):
    manager = busy_manager()
    np.savez(tmp_path / "s.npz", **manager.snapshot())
    (tmp_path / "p.json").write_text(json.dumps([{"name": "mine", "tokens": SYSTEM, "salt": EVIL}]))
    out = tmp_path / "page.html"
    assert app([str(tmp_path / "s.npz"), "--out", str(out), "--prompts", str(tmp_path / "p.json")]) == 0
    assert "120 blocks" in capsys.readouterr().out
    told = embedded(out.read_text())["picture"]["explanations"]
    assert [(entry["name"], entry["reused"]) for entry in told] == [("mine", 80)]


def edited(change) -> bytes:
    shown = picture(busy_manager())
    change(shown)
    return json.dumps(shown).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither a snapshot nor a recording"),
        (b"[]", "neither a snapshot nor a recording"),
        (b"{}", "version"),
        (b"PK\x03\x04 cut off", "not a snapshot"),
        (edited(lambda p: p.update(version=2)), "version 2"),
        (edited(lambda p: p.update(num_blocks=10**9)), "num_blocks is 1000000000"),
        (edited(lambda p: p["blocks"].append(3)), "distinct"),
        (edited(lambda p: p.update(tokens=p["tokens"][:-4])), "tokens"),
        (edited(lambda p: p.update(states=p["states"][:-1] + "?")), "states"),
        (edited(lambda p: p["leases"].pop()), "leases"),
        (edited(lambda p: p.update(tick=float("nan"))), "NaN"),
        (edited(lambda p: p["runs"]["parent"].__setitem__(0, 0)), "hangs from a place"),
        (edited(lambda p: p["runs"]["length"].__setitem__(0, 1)), "sum"),
        (edited(lambda p: p["sequences"][0].update(at=999)), "999"),
        (edited(lambda p: p["sequences"][0].update(tail=[120])), "not in the pool"),
        (edited(lambda p: p["namespaces"][0].update(label=["x"])), "label"),
        (edited(lambda p: p.pop("counters")), "counters"),
        (json.dumps({"snapshot": picture(busy_manager()), "series": [{"time": 0}]}).encode(), "free"),
    ],
)
def test_a_bad_file_ends_in_one_line(tmp_path, capsys, content, words):
    file, out = tmp_path / "bad", tmp_path / "page.html"
    file.write_bytes(content)
    assert app([str(file), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("blockmgr: ") and told.count("\n") == 1 and words in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["{}/none.npz"], "No such file"),
        (["{}/s.npz", "--live"], "only a server"),
        (["http://127.0.0.1:1"], "refused"),
        (["http://127.0.0.1:1", "--live"], "refused"),
        (["http://127.0.0.1:1", "--live", "--every", "0"], "--every 0.0"),
        (["{}/s.npz", "--out", "{}/no/page.html"], "does not exist"),
        (["{}/s.npz", "--prompts", "{}/bad.json"], "unknown pepper in prompt 0"),
        (["{}/p.json", "--prompts", "{}/good.json"], "only a snapshot file"),
    ],
)
def test_bad_options_end_in_one_line(tmp_path, capsys, options, words):
    np.savez(tmp_path / "s.npz", **busy_manager().snapshot())
    (tmp_path / "p.json").write_text(json.dumps(picture(busy_manager())))
    (tmp_path / "bad.json").write_text('[{"tokens": [1], "pepper": 1}]')
    (tmp_path / "good.json").write_text('[{"tokens": [1]}]')
    assert app([option.format(tmp_path) for option in options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("blockmgr: ") and told.count("\n") == 1 and words in told


# --- the server ----------------------------------------------------------------------------------------------------


class SlowRunner:
    """A model that takes a moment and always says 3; `computing` is True meanwhile."""

    vocabulary, max_tokens = 10_000, 4096

    def __init__(self) -> None:
        self.pages = self
        self.computing = False
        self.steps = 0

    def copy(self, copies) -> None:
        pass

    def greedy(self, rows, keep):
        self.computing = True
        time.sleep(0.005)
        self.computing = False
        self.steps += 1
        return np.full(len(keep), 3)


class Tokenizer:
    eos_token_id = None


def test_a_server_is_looked_at_between_steps_and_by_its_own_machine_only():
    async def main() -> None:
        runner = SlowRunner()
        front = AsyncEngine(Engine(BlockManager(16, 16), runner))
        server = make_app(front, Tokenizer(), "tiny")

        async def get(route: str, host: str = "127.0.0.1") -> httpx.Response:
            transport = httpx.ASGITransport(server, client=(host, 50_000))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.get(route)

        async def generate(prompt: list[int]) -> list[int]:
            return [token async for token in front.generate(prompt, 60)]

        assert (await get("/snapshot")).status_code == 503
        async with front:
            # given one request that fills most of the pool and one that must wait
            tasks = [asyncio.create_task(generate([*SYSTEM, number])) for number in (1, 2)]
            while runner.steps < 2:
                await asyncio.sleep(0.001)
            # when it is looked at, then no step is under way
            seen = [await front.between_steps(lambda: (runner.computing, runner.steps)) for _ in range(5)]
            assert not any(computing for computing, _ in seen) and seen[-1][1] > seen[0][1]
            shown = (await get("/snapshot")).json()
            assert shown["states"].count("l") >= 11 and len(shown["sequences"]) == 1
            assert [told["name"] for told in shown["explanations"]] == ["waiting request 1"]
            assert shown["explanations"][0]["reused"] == 160
            assert "blockmgr:free" in (await get("/metrics")).text
            assert (await get("/snapshot", "::1")).status_code == 200
            for host in ("10.0.0.7", "nonsense"):
                refused = await get("/snapshot", host)
                assert refused.status_code == 403 and "tokens" not in refused.text
            with pytest.raises(ZeroDivisionError):
                await front.between_steps(lambda: 1 // 0)
            assert await asyncio.gather(*tasks) == [[3] * 60] * 2
            assert (await get("/snapshot")).json()["sequences"] == []
        with pytest.raises(EngineStopped):
            await front.between_steps(lambda: 0)

    asyncio.run(main())


# --- the live view -------------------------------------------------------------------------------------------------


def drawn(renderable) -> str:
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_the_live_view_draws_a_recorded_picture():
    now = picture(busy_manager())["counters"]
    before = {**now, "admitted": now["admitted"] - 4, "prompt_tokens": now["prompt_tokens"] - 400,
              "hit_tokens": now["hit_tokens"] - 100, "leased": 0}  # fmt: skip
    text = drawn(live_view.render([(10.0, before), (12.0, now)], "http://server"))
    assert "http://server: 120 blocks" in text
    bar = text.splitlines()[1]
    assert len(bar.strip()) == 72 and {"█", "▒", "▓", "░"} == set(bar.strip())
    assert re.search(rf"leased {now['leased']} .*fenced {now['fenced']} .*cached {now['cached']} ", text)
    assert re.search(r"admitted +8 +2\.0", text) and "25.0% lately" in text
    alone = drawn(live_view.render([(10.0, now)], "x", problem="[red]gone[/red]"))
    assert "[red]gone[/red]" in alone and re.search(r"admitted +8 +-", alone)


def test_the_live_view_reads_what_the_server_reports():
    manager = busy_manager()
    values = live_view.parse(metrics.exposition(manager, 'a "model"\\\nname'))
    assert values == {name: metrics.read(manager)[name] for name in metrics.EXPORTED}
    with pytest.raises(BadInput, match="vllm:kv_cache_usage_perc is missing"):
        live_view.parse("<html>not metrics</html>")


def test_watching_survives_a_missing_answer_and_ends_with_an_interrupt(monkeypatch, capsys):
    manager = busy_manager()
    answers = iter([metrics.exposition(manager).encode(), BadInput("gone for now"), KeyboardInterrupt()])

    def fetch(url: str, route: str, timeout: float) -> bytes:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(live_view, "fetch", fetch)
    assert app(["http://server", "--live", "--every", "0.1"]) == 0
    assert next(answers, None) is None and "gone for now" in capsys.readouterr().out


# --- the page ------------------------------------------------------------------------------------------------------


def embedded(html: str) -> dict:
    """The data in a page, found as a browser finds it: up to the first end tag of a script."""
    start = html.index('id="data">') + len('id="data">')
    return json.loads(html[start : html.index("</script", start)])


def test_nothing_in_the_data_can_end_the_data():
    shown = picture(busy_manager(), [Prompt(EVIL, [1, 2, 3])])
    html = page(shown, title=f"{EVIL} {{{{data}}}}")
    assert embedded(html)["picture"] == shown and embedded(html)["title"].startswith(EVIL)
    assert html.count("<script") == 2 and html.count("</script") == 2 and "<img" not in html
    program = html.replace(json.dumps(embedded(html), separators=(",", ":")).replace("<", "\\u003c"), "")
    assert len(program) < len(html) and not re.search(r"src=|href=|url\(|import\b|fetch\(|https?:|innerHTML", program)


def browse(file: Path, *options: str, window: str = "1300,1600") -> str:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    profile = f"--user-data-dir={file.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, f"--window-size={window}", *options, file.as_uri()],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def attributes(dom: str) -> dict[str, str]:
    return dict(re.findall(r'data-(\w+)="([^"]*)"', dom[: dom.index("<head")]))


def series_of(count: int) -> list[dict]:
    return [
        {"time": i / 2, "free": 120 - i, "cached": i // 2, "leased": i - i // 2, "fenced": 0,
         "hit_rate": None if i < 3 else i / count}
        for i in range(count)
    ]  # fmt: skip


# Run in the page after it is ready; what it finds is left in the document for --dump-dom.
DRIVER = """<script>
const key = (id, name) => document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", { key: name }));
const found = { title: document.title, images: document.images.length, scripts: document.scripts.length };
const said = id => document.getElementById(id).textContent;
key("tree", "ArrowDown"); key("tree", "ArrowDown"); found.node = said("chosen");
key("tree", "Enter"); found.crumbs = said("crumbs");
key("tree", "Escape"); key("tree", "Escape"); found.out = said("crumbs");
key("pool", "ArrowRight"); found.cell = said("chosen");
key("series", "ArrowRight"); key("series", "ArrowRight"); found.moment = said("moment");
const box = document.getElementById("tree").getBoundingClientRect();
const over = { clientX: box.left + 3, clientY: box.top + 60 };
document.getElementById("tree").dispatchEvent(new MouseEvent("mousemove", over));
found.tip = said("tip"); found.tipShown = !document.getElementById("tip").hidden;
found.answers = PROMPTS.map(([ids, space]) => {
  document.getElementById("ids").value = ids.join(", "); document.getElementById("space").value = space;
  document.getElementById("ask").requestSubmit(); return said("answer");
});
document.getElementById("colour").value = "age"; document.getElementById("colour").dispatchEvent(new Event("change"));
document.getElementById("theme").click(); found.theme = document.documentElement.dataset.theme;
const result = document.createElement("pre"); result.id = "found";
result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(found)))); document.body.append(result);
</script>"""


@needs_chromium
def test_the_page_works_in_a_browser(tmp_path):
    # given a page of hostile names, and prompts that diverge, miss, hit and belong elsewhere
    manager = busy_manager()
    asked = [
        (SYSTEM[:100] + [5] * 60, 0), ([9999] * 50, 0), ([*SYSTEM, 1], 0), ([*SYSTEM, 1], 1), (SYSTEM[:10], 0),
        ([0, 1, 2, *[7] * 30], 1), (SYSTEM + [1000] * 20, 0),
    ]  # fmt: skip
    html = page(picture(manager, [Prompt(EVIL, [1, 2])]), series_of(50), title=EVIL)
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", DRIVER.replace("PROMPTS", json.dumps(asked)) + "</body>"))

    # when it is used by keyboard, pointer and form
    dom = browse(file, "--dump-dom", "--virtual-time-budget=4000")
    state = attributes(dom)
    assert state["ready"] == "1" and "error" not in state
    assert state["blocks"] == "120" and state["series"] == "50" and state["sequences"] == "6"
    found = json.loads(base64.b64decode(re.search(r'<pre id="found">([^<]*)<', dom)[1]))

    # then nothing of the data ran, and everything is said in words
    assert found["title"] == EVIL and found["images"] == 0 and found["scripts"] == 3
    assert "chat 0, chat 4, sequence 8" in found["node"] and f"pin of {EVIL[:40]}" in found["node"]
    assert "0 to 15 of its prefix" in found["node"] and "0 1 2 3 4" in found["node"]
    assert found["crumbs"].startswith("everything") and "default" in found["crumbs"] and found["out"] != found["crumbs"]
    assert found["cell"].startswith("block1, leased") and found["moment"].startswith("time 0.5: 1 leased")
    assert found["tipShown"] and "leases" in found["tip"] and found["theme"] == "dark"
    spaces = [Namespace(), Namespace(salt=EVIL)]
    for (ids, space), answer in zip(asked, found["answers"], strict=True):
        reused = manager.lookup(ids, spaces[space])
        assert re.search(rf"\b{reused} (of {len(ids)} tokens )?reused", answer), (answer, reused)
    words = ["differs from token 100", "nothing that is cached", "every whole block", "another namespace", "no whole",
             "differs from token 3 ", "every whole block"]  # fmt: skip
    for word, answer in zip(words, found["answers"], strict=True):
        assert word in answer


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_screenshot_shows_the_states(tmp_path, theme):
    file, shot = tmp_path / "page.html", tmp_path / "shot.png"
    html = page(picture(busy_manager()), series_of(50))
    file.write_text(html.replace("location.hash.slice(1)", f"'theme={theme}'"))
    browse(file, f"--screenshot={shot}")
    colours = {colour: count for count, colour in Image.open(shot).convert("RGB").getcolors(1 << 20)}
    fenced, cached = (204, 121, 167), {"light": (86, 180, 233), "dark": (59, 143, 196)}[theme]
    one, two = {"light": ((243, 193, 95), (230, 159, 0)), "dark": ((143, 90, 18), (194, 122, 16))}[theme]
    assert colours[{"light": (255, 255, 255), "dark": (20, 23, 28)}[theme]] > 10_000
    for colour in (fenced, cached, one, two):
        assert colours.get(colour, 0) > 500, colour


def many_blocks() -> dict:
    """A pool of 100,000 blocks: 40 system prompts, thousands of continuations, a tenth of them running."""
    rng = np.random.default_rng(0)
    manager = BlockManager(100_000, 16)
    systems = [rng.integers(0, 150_000, 16 * 40) for _ in range(40)]
    while manager.pool.free > 200:
        prompt = np.concatenate([systems[rng.integers(40)], rng.integers(0, 150_000, rng.integers(16, 640))])
        seq = admitted(manager, prompt)
        if rng.random() < 0.9:
            manager.free(seq)
    return picture(manager)


@needs_chromium
def test_a_page_of_100_000_blocks_is_small_and_drawn_quickly(tmp_path):
    html = page(many_blocks(), series_of(2))
    assert len(html) < 15e6
    file, shot = tmp_path / "page.html", tmp_path / "shot.png"
    file.write_text(html)
    state = attributes(browse(file, "--dump-dom"))
    assert state["ready"] == "1" and state["blocks"] == "100000" and int(state["cached"]) > 90_000
    assert int(state["nodes"]) > 4000 and int(state["ms"]) < 6000
    browse(file, f"--screenshot={shot}")
    colours = {colour: count for count, colour in Image.open(shot).convert("RGB").getcolors(1 << 20)}
    assert colours[(86, 180, 233)] > 100_000 and colours[(243, 193, 95)] > 5000


@needs_chromium
def test_deep_and_empty_trees_are_drawn(tmp_path):
    manager = BlockManager(4000, 4)
    for depth in range(1, 400):  # a comb: every prompt leaves the one before a block further down
        manager.free(admitted(manager, [1] * (4 * depth) + [depth + 2] * 4))
    empty, file = BlockManager(1, 1, caching=False), tmp_path / "page.html"
    for looked_at, cached, words in ((manager, "798", "bars further down"), (empty, "0", "1 block of 1 token, 0 runs")):
        file.write_text(page(picture(looked_at)))
        dom = browse(file, "--dump-dom")
        state = attributes(dom)
        assert state["ready"] == "1" and state["cached"] == cached
        assert words in dom[: dom.index('id="data"')]


def test_a_large_picture_keeps_the_first_ids_of_each_block(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_page, "MOST_TOKENS", 40)
    manager = BlockManager(64, 16)
    admitted(manager, SYSTEM)
    shown = picture(manager)
    tokens = np.frombuffer(base64.b64decode(shown["tokens"]), "<i4")
    assert shown["width"] == 4 and tokens[:8].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    (tmp_path / "cut.json").write_text(json.dumps(shown))
    assert read(str(tmp_path / "cut.json")) == (shown, [])
