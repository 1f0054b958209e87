"""The page in a real browser: a chat, a click on a token, keys, and sizes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from small_server import make_model, make_tokenizer, serve

from path_attention.serving.command import make_engine
from path_attention.serving.inspection import inspect_token
from path_attention.serving.settings import Settings

webdriver = pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"
    ),
]
SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
KEY, NAME = "let me in", "small"


class Page:
    """The page in a browser, by what it shows."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, key: str = KEY, width: int = 1280, dark: bool = False) -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(self.address)
        if key:
            self.set("key", key)
            self.until(lambda: self.value("model") == NAME)

    def one(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def value(self, name: str) -> str:
        return self.one(name).get_property("value")

    def texts(self, selector: str) -> list[str]:
        """Of each element, as it is, blanks too."""
        code = "return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)"
        return self.driver.execute_script(code, selector)

    def set(self, name: str, value: object) -> None:
        code = (
            "const x = document.getElementById(arguments[0]); x.value = arguments[1]; "
            "x.dispatchEvent(new Event('change'))"
        )
        self.driver.execute_script(code, name, str(value))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def until(self, condition: Any) -> None:
        WebDriverWait(self.driver, 15, poll_frequency=0.05).until(lambda _: condition())

    def ask(self, text: str, tokens: int = 24) -> None:
        """Send a message by keys and wait for the tokens of its answer."""
        self.set("max-tokens", tokens)
        self.set("temperature", 0)
        self.one("prompt").send_keys(text, Keys.ENTER)
        self.until(lambda: self.all(".message:last-child .token"))

    def inspected(self, place: int, layer: int = 0) -> None:
        """Wait until the view shows this token and layer."""
        self.until(
            lambda: (
                self.texts("#chosen")[0].startswith(f"{place}:")
                and f"place {place - 1}. Layer {layer}:" in self.texts("#told")[0]
            )
        )

    def chosen(self) -> int:
        (token,) = self.all('.token[aria-current="true"]')
        return int(token.get_dom_attribute("data-place"))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("path_fox")


@pytest.fixture(scope="module")
def page(model, tmp_path_factory) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    settings = Settings(api_key=KEY, model_name=NAME, max_output_tokens=3000)
    engine = make_engine(model, make_tokenizer(), settings)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    with serve(engine) as address:
        yield Page(driver, address)
        driver.quit()


def test_a_chat_streams_and_a_click_shows_what_the_token_attends(page, model) -> None:
    page.open()
    page.driver.execute_script(
        "window.pieces = 0; new MutationObserver((list) => { for (const x of list) "
        "if (x.target.className === 'text') window.pieces += x.addedNodes.length; })"
        ".observe(document.getElementById('log'), { childList: true, subtree: true })"
    )
    page.set("mode", "chat")
    page.ask("hello")
    assert page.driver.execute_script("return window.pieces") > 5  # not all at once
    prompt = [0, *make_tokenizer()("user: hello\nassistant:")["input_ids"]]
    places = [int(x.get_dom_attribute("data-place")) for x in page.all(".token")]
    assert places == list(range(len(prompt), len(prompt) + 24))
    assert page.all("#log img") == []

    page.all(".token")[10].click()
    place = places[10]
    page.inspected(place)
    assert page.chosen() == place
    ids = model.generate(make_tokens(prompt), max_new_tokens=24, do_sample=False)[0].tolist()
    found = inspect_token(model, ids, place, 0)
    rows = [row.find_elements(By.TAG_NAME, "td") for row in page.all("#largest tbody tr")]
    assert len(rows) == 10
    for row, exact in zip(rows, found.largest(0, 10), strict=True):
        back, *numbers = (cell.text.replace("−", "-") for cell in row[1:])
        assert int(back) == place - 1 - exact["position"]
        names = ("weight", "match", "untransported", "decay", "logit")
        for shown, name in zip(numbers, names, strict=True):
            assert float(shown) == pytest.approx(exact[name], rel=0.051, abs=0.00051)
    spans = page.all("#context span")
    assert len(spans) == place + 1
    best = found.largest(0, 1)[0]["position"]
    shade = page.driver.execute_script(
        "return arguments[0].style.getPropertyValue('--shade')", spans[best]
    )
    assert float(shade) == 1
    assert len(page.all("#coherence polyline")) == 2 and len(page.all("#decay polyline")) == 1


def make_tokens(ids: list[int]) -> Any:
    import torch

    return torch.tensor([ids])


def test_all_of_it_works_by_keys(page) -> None:
    page.open()
    page.set("mode", "text")
    page.ask("def f():")
    first = int(page.all(".token")[0].get_dom_attribute("data-place"))
    page.one("prompt").send_keys(Keys.SHIFT, Keys.TAB)  # from the message back to the answer
    page.press(Keys.ENTER)
    page.inspected(first)
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_RIGHT)
    page.inspected(first + 2)
    assert page.chosen() == first + 2
    page.press("]")
    page.inspected(first + 2, layer=1)
    assert page.value("layer") == "1"
    before = page.texts("#largest td")
    page.press(".")
    assert page.value("head") == "1" and page.texts("#largest td") != before
    page.press(",", "[")
    page.inspected(first + 2)
    assert page.value("head") == "0"
    page.press("[", ",")  # there is no layer and no head below
    assert (page.value("layer"), page.value("head")) == ("0", "0")
    page.press(Keys.END)
    page.inspected(first + 23)
    page.press(Keys.HOME)
    page.inspected(first)
    page.press("?")
    assert page.one("help").is_displayed()
    page.press(Keys.ESCAPE)
    assert not page.one("help").is_displayed()
    page.press("/")
    assert page.driver.switch_to.active_element.get_dom_attribute("id") == "prompt"
    page.press("?", ".")  # in a text they are letters
    assert page.value("prompt") == "?." and not page.one("help").is_displayed()


def test_a_stopped_answer_can_be_looked_into(page) -> None:
    page.open()
    page.set("mode", "text")
    page.set("max-tokens", 3000)
    page.set("temperature", 0)  # drawn, the end token may come first
    page.one("prompt").send_keys("a", Keys.ENTER)
    page.until(lambda: len(page.texts(".message.assistant .text")[0]) > 20)
    page.press(Keys.ESCAPE)
    page.until(lambda: page.all(".token"))
    assert "Stopped." in page.texts("#log .hint")
    assert 20 < len(page.all(".token")) < 3000
    assert page.one("send").is_enabled() and not page.one("stop").is_enabled()
    page.all(".token")[5].click()
    page.inspected(2 + 5)


def test_errors_are_shown_and_text_is_never_markup(page) -> None:
    page.open(key="")
    page.set("mode", "text")
    evil = "<img src=x onerror='document.title=1'><b>"
    page.one("prompt").send_keys(evil, Keys.ENTER)
    page.until(lambda: page.all("#log .error"))
    assert "API key" in page.texts("#log .error")[0]
    assert page.texts(".message.user .text") == [evil]
    assert page.all("#log img, #log b") == [] and page.driver.title == "path-attention"
    assert page.one("key").is_displayed()  # the settings have opened
    page.set("key", KEY)
    page.until(lambda: page.value("model") == NAME)
    page.ask(evil)
    page.all(".token")[0].click()
    page.inspected(len(evil) + 1)
    assert "".join(page.texts("#context span")[1:-1]) == evil
    assert page.all("#context img, #context b") == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_narrow_screens_hold_all_of_it(page, dark) -> None:
    page.open(width=360, dark=dark)
    page.set("mode", "text")
    width = "return [document.documentElement.scrollWidth, window.innerWidth]"
    assert page.driver.execute_script(width)[0] <= 360
    page.ask("x" * 80)
    page.all(".token")[3].click()
    page.inspected(1 + 80 + 3)
    scroll, inner = page.driver.execute_script(width)
    assert scroll <= inner == 360
    top = page.driver.execute_script(
        "return document.getElementById('inspector').getBoundingClientRect().top"
    )
    assert abs(top) < 400  # it came into view
    paper, ink = (
        page.one("prompt").value_of_css_property(name) for name in ("background-color", "color")
    )
    assert (brightness(paper) < brightness(ink)) == dark


def brightness(colour: str) -> float:
    return sum(float(x) for x in colour.partition("(")[2].rstrip(")").split(",")[:3])


def test_nothing_comes_from_elsewhere_and_nothing_is_logged(page) -> None:
    page.driver.get_log("browser")
    page.open()
    page.set("mode", "text")
    page.ask("abc")
    page.all(".token")[0].click()
    page.inspected(4)
    code = "return performance.getEntriesByType('resource').map((x) => x.name)"
    loaded = page.driver.execute_script(code)
    assert len(loaded) >= 8 and all(name.startswith(page.address) for name in loaded)
    # the first look for models has no key yet
    logged = [x for x in page.driver.get_log("browser") if "v1/models" not in x["message"]]
    assert logged == []
