"""The playground in a real Chromium, before a gateway, a verifier and a drafter whose models are emulated.

PLAYGROUND_REQUIRED=1 makes a missing browser a failure. PLAYGROUND_SHOTS=FOLDER writes the pictures of docs/, of the
shipped models.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Literal

import httpx
import pytest
import pytest_asyncio

from slipstream.client.gateway_endpoint import digest
from slipstream.engine.factory import open_engine
from tests.support.emulated_system import EmulatedSystem, emulated_system
from tests.support.fleet import slowed

CHROMIUM = shutil.which("chromium") or ""
try:
    from playwright.async_api import ConsoleMessage, Error, Page, ViewportSize, async_playwright, expect
except ImportError:  # an environment without the extra `browser`
    CHROMIUM = ""
if not CHROMIUM and os.environ.get("PLAYGROUND_REQUIRED") != "1":
    pytest.skip("there is no Chromium, or no playwright", allow_module_level=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAIT_MS = 60_000
DESKTOP, PHONE = ViewportSize(width=1280, height=720), ViewportSize(width=390, height=844)
Scheme = Literal["light", "dark"]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
KEY, OTHER = "sk-of-the-operator", "sk-of-another"
PYTHON = [sys.executable, "-c"]
SHOTS = os.environ.get("PLAYGROUND_SHOTS", "")
LEAST_CONTRAST, LEAST_BORDER_CONTRAST = 4.5, 3.0
PICTURE = ViewportSize(width=980, height=1000)
COLOURS = 96
"""Different ones in a picture of docs/."""
PAIRS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const opaque = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
      if (found[3] > 0) throw Error("a translucent background: " + at.outerHTML.slice(0, 80));
    }
    throw Error("no background");
  };
  const pairs = {};
  const add = (node, colour, name = `${node.tagName}.${node.getAttribute("class") || node.id || ""}`) => {
    const [a, b] = [luminance(rgb(colour)), luminance(opaque(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    pairs[name] = Math.min(ratio, pairs[name] ?? 99);
  };
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    if (node.tagName === "text") add(node, style.fill);
    else if ([...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim())) add(node, style.color);
    if (node.matches("input, textarea")) {
      add(node, style.color);
      if (node.placeholder) add(node, getComputedStyle(node, "::placeholder").color);
    }
    const drawn = node.matches("button, textarea, input:not([type=radio], [type=checkbox])");
    if (drawn) add(node.parentElement, style.borderTopColor, `border of ${node.tagName}.${node.id || node.name}`);
  }
  return pairs;
}"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmulatedSystem]:
    template = tmp_path_factory.mktemp("chat") / "chat.jinja"
    template.write_text(TEMPLATE)
    async with emulated_system(chat_template=str(template)) as system:
        yield system


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tab() -> AsyncIterator[Page]:
    """One for all tests: a page that gets a renderer of its own takes 0.8 CPU seconds more."""
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=WAIT_MS)
        context = await browser.new_context()
        context.set_default_timeout(WAIT_MS)
        yield await context.new_page()
        await browser.close()


@asynccontextmanager
async def opened(tab: Page, url: str, scheme: Scheme = "light", size: ViewportSize = DESKTOP) -> AsyncIterator[Page]:
    """The page, loaded anew; nothing on it may have failed at the end, nor been refused by its policy."""
    faults: list[str] = []

    def note_error(error: Error) -> None:
        faults.append(str(error))

    def note_refusal(said: ConsoleMessage) -> None:
        if "Content Security Policy" in said.text:
            faults.append(said.text)

    await tab.emulate_media(color_scheme=scheme)
    await tab.set_viewport_size(size)
    tab.on("pageerror", note_error)
    tab.on("console", note_refusal)
    try:
        await tab.goto(f"{url}/playground")
        yield tab
        assert not faults
    finally:
        await tab.unroute_all()
        await tab.goto("about:blank")  # what it asked of a server ends
        tab.remove_listener("pageerror", note_error)
        tab.remove_listener("console", note_refusal)


@pytest_asyncio.fixture(loop_scope="module")
async def page(tab: Page, system: EmulatedSystem) -> AsyncIterator[Page]:
    async with opened(tab, system.url) as page:
        yield page


async def run(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        await page.locator(f"#request [name={name}]").fill(value)
    await page.locator("#run").click()


async def says(page: Page, text: str | re.Pattern[str]) -> None:
    await expect(page.locator("#status")).to_have_text(text, timeout=WAIT_MS)


async def figure(page: Page, name: str, run: int = 0) -> str:
    found = page.locator(".run").nth(run).locator("dl > div").filter(has_text=name).locator("dd")
    return await found.first.inner_text()


async def test_tokens_stream_in_the_colours_of_their_origins(page: Page) -> None:
    await run(page, max_tokens="64", temperature="0")
    await says(page, "Done.")
    assert await figure(page, "Tokens") == "64"
    assert float(await figure(page, "Tokens/s")) > 0 and (await figure(page, "TTFT")).endswith("ms")
    text = await page.locator(".output").text_content()
    tokens = await page.locator(".output .token").all_text_contents()
    assert tokens and "".join(tokens) == text
    known = await page.locator(".output :is(.drafted, .recovered, .bonus, .plain)").count()
    assert known > 0 and await page.locator(".output .unknown").count() <= 1  # an incomplete character at the end
    await expect(page.locator("#timeline rect.verifying").first).to_be_attached(timeout=WAIT_MS)


async def test_accepted_candidates_show_their_drafter_and_its_lane(page: Page) -> None:
    for _ in range(20):  # candidates that come too late are not verified, as on a busy machine
        await run(page, max_tokens="64", temperature="0")
        await says(page, "Done.")
        if await page.locator(".output .drafted.drafter-0").count():
            break
    assert await page.locator(".output .drafted.drafter-0").count()
    await expect(page.locator("#legend")).to_contain_text("accepted from model", timeout=WAIT_MS)
    await expect(page.locator("#timeline rect.drafter-0").first).to_be_attached(timeout=WAIT_MS)
    assert (await figure(page, "Acceptance rate")).endswith("%")
    await page.locator(".output .drafted").first.hover()
    await expect(page.locator("#round")).to_contain_text("guessed by model, accepted", timeout=WAIT_MS)
    await expect(page.locator("#round")).to_contain_text(
        re.compile(r"Round \d+: \d+ drafted, \d+ accepted \(model .*verified in .* ms")
    )


async def test_the_keyboard_reaches_every_token(page: Page) -> None:
    await page.locator("#request [name=max_tokens]").fill("24")
    await page.locator("#request [name=prompt]").focus()
    while await page.evaluate("document.activeElement.id") != "run":
        await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await says(page, "Done.")
    while not await page.evaluate("document.activeElement.classList.contains('token')"):
        await page.keyboard.press("Tab")
    before = await page.locator("#round").inner_text()
    await page.keyboard.press("End")
    await expect(page.locator(".output .token").last).to_be_focused(timeout=WAIT_MS)
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator(".output .token").nth(-2)).to_be_focused(timeout=WAIT_MS)
    assert await page.locator("#round").inner_text() != before
    assert await page.locator(".output .token[tabindex='0']").count() == 1


async def test_on_and_off_give_the_same_text(page: Page) -> None:
    await page.locator("[name=compare]").check()
    await run(page, max_tokens="48", seed="11")
    await says(page, "Done.")
    await expect(page.locator("#verdict")).to_have_text(
        re.compile(r"Identical text: 48 tokens, [\d.]+ and [\d.]+ tokens/s\.")
    )
    texts = await page.locator(".output").all_text_contents()
    assert len(texts) == 2 and texts[0] == texts[1] != ""
    assert await page.locator(".run").nth(1).locator(".drafted").count() == 0


async def test_a_chat_is_answered(page: Page) -> None:
    await page.locator("[name=mode][value=chat]").check()
    await expect(page.locator("#prompt-name")).to_have_text("Message")
    await run(page, prompt="Hello", system="Be short.", max_tokens="16")
    await says(page, "Done.")
    assert await figure(page, "Tokens") == "16"


async def test_generated_text_is_shown_as_text_and_never_as_html(page: Page) -> None:
    """As it would arrive: what a chunk says is put on the page by the page's own code."""
    evil = "<img src=x onerror=document.title=1><script>document.title=2</script>"
    made = await page.evaluate(
        """async (text) => {
          const { Palette, Run } = await import("/playground/run.js");
          const run = new Run("r", new Palette(document.getElementById("legend")), () => {});
          document.getElementById("runs").append(run.root);
          const tokens = [{ text, origin: "drafted", drafters: [text] }];
          const times = { wait_ms: 0, bubble_ms: 0, verify_ms: 1, drafts: [], drafters: [] };
          const round = { round: 1, drafted: 1, accepted: 1, tokens, ...times };
          run.add({ choices: [{ text, speculation: { rounds: [round] } }] });
          return [run.output.textContent, document.querySelectorAll("#runs img, #runs script, #legend img").length];
        }""",
        evil,
    )
    assert made == [evil, 0]
    assert await page.title() == "Slipstream playground"


async def test_mixed_arithmetic_can_be_requested_and_is_marked(page: Page) -> None:
    await page.locator("[name=mixed_arithmetic]").check()
    await page.locator("summary").click()
    snippets = []
    for language in ("curl", "client", "openai"):
        await page.locator(f"[name=language][value={language}]").check()
        snippets.append(await page.locator("#snippet").inner_text())
    wanted = ['"mixed_arithmetic":true', "mixed_arithmetic=True", '{"mixed_arithmetic": True']
    assert all(each in snippet for each, snippet in zip(wanted, snippets, strict=True))
    async with page.expect_request("**/v1/completions") as asked:
        await run(page, max_tokens="8")
    assert (await asked.value).post_data_json["mixed_arithmetic"] is True
    await says(page, "Done.")
    note = page.locator(".run .mixed")
    await expect(note).to_be_hidden()
    await page.evaluate(
        """async () => {
          const { Palette, Run } = await import("/playground/run.js");
          const run = new Run("r", new Palette(document.getElementById("legend")), () => {});
          document.getElementById("runs").replaceChildren(run.root);
          const arithmetics = [{ arithmetic: "one", offset: 0 }, { arithmetic: "two", offset: 9 }];
          run.add({ choices: [{ text: "", arithmetics }] });
        }"""
    )
    await expect(note).to_have_text("Mixed text: one from token 0, two from token 9.")


async def test_stop_frees_the_session(page: Page, system: EmulatedSystem) -> None:
    await run(page, max_tokens="4000")
    await expect(page.locator(".output .token").first).to_be_visible(timeout=WAIT_MS)
    await page.locator("#stop").click()
    await says(page, "Stopped.")
    await expect(page.locator("#fleet-note")).to_have_text("0 sessions at this gateway.", timeout=WAIT_MS)
    await expect(page.locator("#run")).to_be_enabled()


AGAIN = 240
"""Tokens of a text in whose middle its gateway ends: some three seconds of passes."""


async def test_a_run_survives_the_restart_of_its_gateway(page: Page, system: EmulatedSystem) -> None:
    asked = {"prompt": "again", "max_tokens": AGAIN, "seed": 5, "temperature": 0.7}
    await run(page, prompt="again", max_tokens=str(AGAIN), seed="5", temperature="0.7")
    await expect(page.locator(".output .token").first).to_be_visible(timeout=WAIT_MS)
    await system.stop_gateway()
    await says(page, "Connection lost; reconnecting…")
    await system.start_gateway()
    await says(page, "Done.")
    async with httpx.AsyncClient(base_url=system.url, timeout=60, trust_env=False) as client:
        whole = (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
    assert await page.locator(".output").text_content() == whole


async def test_errors_are_shown(page: Page) -> None:
    await run(page, drafters="nobody")
    await expect(page.locator("#error")).to_contain_text("There is no drafter 'nobody'", timeout=WAIT_MS)
    await says(page, "Failed.")
    await run(page, drafters="", max_tokens="8")
    await says(page, "Done.")
    await expect(page.locator("#error")).to_be_hidden()


async def test_the_fleet_is_shown(page: Page) -> None:
    await expect(page.locator("#verifiers")).to_contain_text("emulated", timeout=WAIT_MS)
    await expect(page.locator("#verifiers")).to_contain_text("ready", timeout=WAIT_MS)
    await expect(page.locator("#drafters")).to_contain_text("model", timeout=WAIT_MS)


async def test_the_fleet_shows_the_state_and_load_of_every_worker(tab: Page, system: EmulatedSystem) -> None:
    load = {"sessions": 3, "waiting": 2, "kv_blocks_total": 100, "kv_blocks_free": 40, "draining": False}
    verifier = {"role": "ROLE_VERIFIER", "address": "a:1", "present": True, "model": {"name": "m"}, "load": load}
    drafter = verifier | {"role": "ROLE_DRAFTER", "name": "ngram", "load": load | {"draining": True}}
    workers = [verifier, verifier | {"address": "b:2", "present": False}, drafter]
    async with opened(tab, system.url) as page:
        await page.route("**/playground/fleet", lambda route: route.fulfill(json={"sessions": 1, "workers": workers}))
        await expect(page.locator("#fleet-note")).to_have_text("1 session at this gateway.", timeout=WAIT_MS)
        rows = [
            await line.locator("td").all_inner_texts() for line in await page.locator("#fleet-title ~ div tr").all()
        ]
    there, away = ["a:1", "m", "ready", "3", "2", "60 %"], ["b:2", "m", "away", "3", "2", "60 %"]
    assert rows == [[], there, away, [], ["ngram", "m", "draining", "3", "60 %", "a:1"]]


async def test_everything_is_reached_by_the_keyboard_and_shows_that_it_is(page: Page) -> None:
    await run(page, max_tokens="8")
    await says(page, "Done.")
    await page.locator("summary").click()
    await page.locator("body").press("Tab")
    reached: list[str] = []
    while not reached or reached[0] not in reached[1:]:
        name, outline = await page.evaluate(
            """() => {
              const at = document.activeElement;
              const said = at.labels?.[0]?.textContent ?? at.getAttribute("aria-label") ?? at.textContent;
              return [at.name || at.id || said.trim(), parseFloat(getComputedStyle(at).outlineWidth)];
            }"""
        )
        assert outline >= 2, f"{name} does not show that it has the focus"
        reached.append(name)
        await page.keyboard.press("Tab")
    fields = ["mode", "prompt", "max_tokens", "temperature", "top_p", "seed", "max_draft_tokens", "drafters", "key"]
    rest = ["speculate", "compare", "run", "timeline", "This request as code", "language", "copy", "Code"]
    assert {*fields, *rest, "Verifiers", "Drafters"} <= {*reached}


async def test_copied_code_gives_the_text_of_the_page(tab: Page, system: EmulatedSystem) -> None:
    await tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    async with opened(tab, system.url) as page:
        await run(page, prompt='it\'s "quoted"', max_tokens="24", seed="9")
        await says(page, "Done.")
        text = await page.locator(".output").text_content()
        await page.locator("summary").click()
        for language, command in (("curl", ["bash", "-c"]), ("client", PYTHON), ("openai", PYTHON)):
            await page.locator(f"[name=language][value={language}]").check()
            await page.locator("#copy").click()
            await says(page, "Copied.")
            code = await page.evaluate("navigator.clipboard.readText()")
            assert code == await page.locator("#snippet").text_content()
            made = await asyncio.create_subprocess_exec(*command, code, stdout=asyncio.subprocess.PIPE)
            printed, _ = await asyncio.wait_for(made.communicate(), 60)
            answer = printed.decode()
            assert (json.loads(answer)["choices"][0]["text"] if language == "curl" else answer[:-1]) == text
            await page.locator("#status").evaluate("node => { node.textContent = ''; }")
    await tab.context.clear_permissions()


async def test_code_holds_the_request_and_no_key(page: Page, system: EmulatedSystem) -> None:
    await page.locator("[name=key]").fill("secret-key")
    await page.locator("[name=prompt]").fill('it\'s "quoted"')
    await page.locator("summary").click()
    snippets = {}
    for language in ("curl", "client", "openai"):
        await page.locator(f"[name=language][value={language}]").check()
        snippets[language] = await page.locator("#snippet").inner_text()
        assert "secret-key" not in snippets[language]
    assert "-d '{\"prompt\":\"it'\\''s" in snippets["curl"] and "/v1/completions" in snippets["curl"]
    for language, needed in {"client": "slipstream.Client(", "openai": "client.completions.create("}.items():
        compile(snippets[language], language, "exec")
        assert needed in snippets[language] and 'it\'s \\"quoted\\"' in snippets[language]
    assert f'slipstream.Client("{system.gateway.address}")' in snippets["client"]
    assert await page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrast_is_enough_in_both_themes(tab: Page, system: EmulatedSystem, scheme: Scheme) -> None:
    async with opened(tab, system.url, scheme) as page:
        await page.locator("[name=compare]").check()
        await run(page, max_tokens="48", temperature="0")
        await says(page, "Done.")
        await page.locator("summary").click()
        await expect(page.locator("#verifiers")).to_contain_text("ready", timeout=WAIT_MS)
        # Whatever this run did not show: every kind of token, and what goes wrong.
        await page.evaluate("""() => {
          const kinds = ["recovered", "bonus", "plain", "unknown", ...[0, 1, 2, 3].map((n) => "drafted drafter-" + n)];
          for (const kind of kinds) {
            const span = document.createElement("span");
            span.className = "token " + kind;
            span.textContent = kind;
            document.querySelector(".output").append(span);
          }
          for (const id of ["error", "verdict"]) Object.assign(document.getElementById(id), { hidden: false });
          document.getElementById("error").textContent = "wrong";
          const other = document.getElementById("verdict").cloneNode(true);
          other.classList.add("different");
          document.querySelector("main").append(other);
        }""")
        pairs = await page.evaluate(PAIRS)
        borders = {name: ratio for name, ratio in pairs.items() if name.startswith("border of")}
        assert len(pairs) - len(borders) > 20 and len(borders) > 10
        assert {name: ratio for name, ratio in borders.items() if ratio < LEAST_BORDER_CONTRAST} == {}
        words = pairs.keys() - borders
        assert {name: pairs[name] for name in words if pairs[name] < LEAST_CONTRAST} == {}
        luminous = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminous == "rgb(255, 255, 255)") == (scheme == "light")


async def test_a_phone_has_one_column(tab: Page, system: EmulatedSystem) -> None:
    async with opened(tab, system.url, size=PHONE) as page:
        await page.locator("[name=compare]").check()
        await run(page, max_tokens="48")
        await says(page, "Done.")
        await expect(page.locator("#verifiers")).to_contain_text("ready", timeout=WAIT_MS)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        timeline, lanes = page.locator("#timeline"), page.locator("#timeline .lanes")
        assert await timeline.evaluate("node => node.scrollLeft") > 0  # it follows the last round
        outer, inner = await timeline.bounding_box(), await lanes.bounding_box()
        assert outer and inner and outer["x"] <= inner["x"] <= outer["x"] + 2
        await expect(lanes).to_contain_text("verifier")
        boxes = [await page.locator(".run").nth(index).bounding_box() for index in range(2)]
        assert boxes[0] and boxes[1] and boxes[0]["x"] == boxes[1]["x"]
        assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]


async def test_the_page_is_open_and_all_else_needs_its_key(tab: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'ops = {{ sha256 = "{digest(KEY).hex()}", operator = true }}\nal = {{ sha256 = "{digest(OTHER).hex()}" }}\n'
    )
    async with emulated_system(api_keys=str(keys)) as guarded, opened(tab, guarded.url) as page:
        await expect(page.locator("#fleet-note")).to_contain_text("key", timeout=WAIT_MS)
        async with httpx.AsyncClient(base_url=guarded.url, timeout=60, trust_env=False) as client:
            for key, status in (("sk-wrong", 401), (OTHER, 403), (KEY, 200)):
                answer = await client.get("/playground/fleet", headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == status
        await run(page)
        await expect(page.locator("#error")).to_be_visible(timeout=WAIT_MS)
        await run(page, key=KEY, max_tokens="8")
        await says(page, "Done.")
        await expect(page.locator("#verifiers")).to_contain_text("ready", timeout=WAIT_MS)


async def test_headers_let_nothing_else_run(system: EmulatedSystem) -> None:
    async with httpx.AsyncClient(base_url=system.url, timeout=60, trust_env=False) as client:
        for path in ("/playground", "/playground/main.js", "/playground/style.css", "/playground/icon.svg"):
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert answer.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"https?://(?!www\.w3\.org)", answer.text)
        assert (await client.get("/playground/../routes.py")).status_code == 404
        assert (await client.get("/playground/nothing.js")).status_code == 404


@pytest.mark.skipif(not SHOTS, reason="set PLAYGROUND_SHOTS=FOLDER to write the pictures of docs/")
@pytest.mark.parametrize(
    ("name", "scheme", "size"),
    [("light", "light", PICTURE), ("dark", "dark", PICTURE), ("phone", "light", PHONE)],
)
async def test_pictures_for_the_documentation(tab: Page, name: str, scheme: Scheme, size: ViewportSize) -> None:
    from PIL import Image  # of matplotlib; only pictures need it

    # In float32 the two texts are one, as the page says.
    target, draft = slowed(open_engine("models/target", "float32"), 0.03), open_engine("models/draft")
    async with (
        emulated_system(target, draft) as system,
        opened(tab, system.url, scheme, size) as page,
    ):
        await page.locator("[name=compare]").check()
        await run(page, max_tokens="96")
        await says(page, "Done.")
        await expect(page.locator("#verdict")).to_contain_text("Identical text")
        await expect(page.locator("#verifiers")).to_contain_text("ready", timeout=WAIT_MS)
        await page.locator(".output .drafted").first.hover()
        picture = await page.screenshot(full_page=name != "phone")
    few = Image.open(BytesIO(picture)).convert("RGB").quantize(COLOURS)  # a third of the bytes
    few.save(Path(SHOTS) / f"playground-{name}.png", optimize=True)
