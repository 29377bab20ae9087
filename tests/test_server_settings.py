"""The settings file: what is refused, and how a server that runs follows it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from qbe.errors import QBEError
from qbe.records.ledger import Ledger, LedgerEntry
from qbe.server.contract import terms
from qbe.server.keys import digest, new_key
from qbe.server.settings import Settings
from qbe.server.settings_file import Watched, load
from server_running import running, until


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[tiers.gold]\nbits = [4, 5]", "tiers.gold: there is no such setting"),
        ("[tiers]\nflex = 4", "tiers.flex"),
        ("tiers = 4", "tiers"),
        ("[tiers.flex]\nprompts = 0", "tiers.flex.prompts"),
        ("[tiers.flex]\nprompts = true", "tiers.flex.prompts"),
        ("[limits]\nqueue = true", "limits.queue"),
        ("[tiers.default]\nbits = [4, 99]", "tiers.default.bits"),
        ("[tiers.default]\nbits = [5, 6]\nfloor = 5.5", "tiers.default"),
        ("[prices]\ninput = -1", "prices.input"),
        ("[limits]\nqueue = 0", "limits.queue"),
        ("[refresh]\ninterval = 0", "refresh.interval"),
        ("[refresh]\ncount = 1.5", "refresh.count"),
        ('[keys.a]\nsha256 = "12"', "keys.a.sha256"),
        ("[prices]\ninput = nan", "prices.input"),
        ("x = ", "TOML"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("x = " + "[" * 600 + "]" * 600, "nested too deeply|no such setting"),
        ("keys." + ".".join("a" * 5000) + " = 1", "keys"),
        ("[limits]\nqueue = " + "1" * 5000, "digits"),
        ("[limits]\nqueue = 0x" + "f" * 10_000, "limits.queue"),
        ("[prices]\noutput = 1e12", "prices.output"),
        ("[prices]\ncached_input = 6e5\n[tiers.priority]\nprice = 1.75", "prices.cached_input: .*tiers.priority.price"),
        ("[prices]\ninput = 1\n[tiers.flex]\nprice = 1e300", "prices.input"),
        ('[prices]\ncurrency = ""', "prices.currency"),
        ('[prices]\ncurrency = "U\\nSD"', "prices.currency"),
        ('[prices]\ncurrency = "US D"', "prices.currency"),
        ('[prices]\ncurrency = "\\u001b[2J"', "prices.currency"),
        (f'[prices]\ncurrency = "{"x" * 17}"', "prices.currency"),
        ('[keys."a\\nb"]\ntiers = ["flex"]', "keys"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(QBEError, match=where) as refused:
        load(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_the_highest_price_can_be_booked(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('[prices]\ncurrency = "€"\noutput = 922337\n[tiers.flex]\nprice = 0.5\n')
    settings = load(path)
    cost = terms("priority", None, settings, 0.0).pricing.cost(0, 0, 10**7, 16)
    Ledger(tmp_path / "ledger.sqlite").write(
        [
            LedgerEntry(
                id="a-0", request="a", key="me", tier="priority", model="tiny", policy="uniform", began="2026-01-01",
                finish="stop", prompt_tokens=0, cached_tokens=0, completion_tokens=10**7, weight_bits=16, kv_bits=16,
                tokens_by_bits={16: 10**7}, cost=cost, currency=settings.prices.currency, joules=0.0, energy="model",
            )
        ]
    )  # fmt: skip
    (total,) = Ledger(tmp_path / "ledger.sqlite").totals()
    assert total.cost == pytest.approx(922337 * 10)


def test_an_empty_file_is_no_change_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[prices]\noutput = 3\n")
    watched = Watched(path)
    for empty in ("", " \n\n"):
        path.write_text(empty)
        assert watched.changed() is None
        assert watched.changed() is None
    path.write_text("[prices]\noutput = 4\n")
    found = watched.changed()
    assert found is not None
    assert found.prices.output == 4
    assert watched.changed() is None
    path.write_text("")
    assert Watched(path).current == Settings()  # at the start there is nothing to keep


def test_a_file_that_could_not_be_read_is_tried_again_without_a_change(tmp_path: Path) -> None:
    path, away = tmp_path / "serve.toml", tmp_path / "away"
    path.write_text("[prices]\noutput = 3\n")
    watched = Watched(path)
    os.rename(path, away)
    for _ in range(2):
        with pytest.raises(QBEError, match="cannot be read"):
            watched.changed()
    os.rename(away, path)
    assert watched.changed() == watched.current
    assert watched.changed() is None


def key_table(name: str) -> str:
    return f'[keys.{name}]\nsha256 = "{digest(name)}"\n'


def test_keys_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    path, keys = tmp_path / "serve.toml", tmp_path / "keys.toml"
    path.write_text("[prices]\noutput = 3\n" + key_table("alice"))
    keys.write_text(key_table("bob"))
    found = load(path, keys)
    assert (found.prices.output, sorted(found.keys)) == (3, ["alice", "bob"])
    assert sorted(load(None, keys).keys) == ["bob"]
    for text, said in (
        (key_table("alice"), "keys.alice: .*serve.toml has a key of this name"),
        ("[prices]\noutput = 4\n", "prices: a file of keys holds no other settings"),
        (key_table("bob").replace(digest("bob"), digest("alice")), "keys: two of them have the same sha256"),
        ('[keys.bob]\nsha256 = "12"\n', "keys.bob.sha256"),
    ):
        keys.write_text(text)
        with pytest.raises(QBEError, match=f"{keys}: {said}") as refused:
            load(path, keys)
        assert "\n" not in str(refused.value)


def test_both_files_are_followed_as_kubernetes_changes_them(tmp_path: Path) -> None:
    """There a mounted file is a link into a folder that is exchanged. Settings may be empty all along."""
    for version, key in (("one", "alice"), ("two", "bob")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys.toml").write_text(key_table(key))
    (tmp_path / "data").symlink_to("one")
    path, keys = tmp_path / "serve.toml", tmp_path / "keys.toml"
    path.write_text("")
    keys.symlink_to("data/keys.toml")
    watched = Watched(path, keys)
    assert list(watched.current.keys) == ["alice"]
    assert watched.changed() is None
    (tmp_path / "next").symlink_to("two")
    os.rename(tmp_path / "next", tmp_path / "data")
    found = watched.changed()
    assert found is not None
    assert list(found.keys) == ["bob"]
    assert watched.changed() is None
    path.write_text("[prices]\noutput = 4\n")
    found = watched.changed()
    assert found is not None
    assert (found.prices.output, list(found.keys)) == (4, ["bob"])
    keys.unlink()
    for _ in range(2):
        with pytest.raises(QBEError, match=r"keys\.toml cannot be read"):
            watched.changed()


def test_a_server_follows_its_settings_whatever_goes_wrong_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qbe.server.service._RELOAD_S", 0.02)
    config = tmp_path / "serve.toml"
    config.write_text("[prices]\noutput = 1\n")

    def said(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    def write(text: str) -> None:
        new = config.with_suffix(".new")
        new.write_text(text)
        os.replace(new, config)

    with caplog.at_level(logging.WARNING, "qbe"), running(config=config, ledger=tmp_path / "ledger.sqlite") as server:
        service, looked = server.service, []

        async def fail(spending: Any) -> None:
            looked.append(1)
            raise RuntimeError("no\nenergy")

        with monkeypatch.context() as patch:
            patch.setattr(service.observer.governor, "look", fail)
            until(lambda: len(looked) > 3, "it goes on")
        assert said("the energy's budget cannot be kept: a defect: RuntimeError") == 1
        assert server.metric("qbe:settings_ok") == 1  # they have nothing to do with it

        looked.clear()

        def broken() -> None:
            looked.append(1)
            raise RuntimeError("no\nsettings")

        with monkeypatch.context() as patch:
            patch.setattr(service._watched, "changed", broken)
            until(lambda: len(looked) > 3, "it goes on")
            assert server.metric("qbe:settings_ok") == 0
        assert said("the settings stay as they were: a defect: RuntimeError") == 1
        assert all("\n" not in record.getMessage() for record in caplog.records if record.name.startswith("qbe"))

        write("x = " + "[" * 100_000)
        until(lambda: said("nested too deeply") == 1, "it says what is wrong")
        write("[prices]\noutput = 2\n")
        until(lambda: service.settings.prices.output == 2, "the new settings")
        assert server.metric("qbe:settings_ok") == 1

        async def hang(spending: Any) -> None:
            looked.append(2)
            await asyncio.sleep(60)

        monkeypatch.setattr(service.observer.governor, "look", hang)  # a source of intensities that says nothing
        until(lambda: 2 in looked, "it is asked")
        write("[prices]\noutput = 3\n")
        until(lambda: service.settings.prices.output == 3, "the newest settings")


def test_the_sample_file_of_the_docs_works_as_it_is_printed(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    samples = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(samples) >= 3
    path = tmp_path / "serve.toml"
    for sample in samples:
        path.write_text(sample)
        load(path)
    path.write_text(samples[0])
    with running(config=path, ledger=tmp_path / "ledger.sqlite") as server:
        assert server.post("completions", {"prompt": "hi", "max_tokens": 1}).status_code == 200
    key, lines = new_key("alice")
    path.write_text(samples[0] + lines + "weight = 2.0\n")  # as `qbe serve --new-key alice` prints them
    with running(config=path, ledger=tmp_path / "ledger.sqlite") as server:
        assert server.post("completions", {"prompt": "hi", "max_tokens": 1}).status_code == 401
        asked = server.post("completions", {"prompt": "hi", "max_tokens": 1}, Authorization=f"Bearer {key}")
        assert asked.status_code == 200
    path.write_text(samples[0] + samples[1])
    found = load(path)
    assert (found.tiers, found.limits) == (
        Settings().tiers.model_copy(update={
            "flex": Settings().tiers.flex.model_copy(update={"price": 0.5}),
            "priority": Settings().tiers.priority.model_copy(update={"price": 1.75}),
        }), Settings().limits,
    )  # fmt: skip
    assert set(found.keys) == {"alice"}


def test_the_settings_and_the_command_line_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.cli.serve import _engine

    path, made = tmp_path / "serve.toml", dict[str, Any]()
    weights = '[weights]\nmost_bits = 6\ndevice_memory = "12GiB"\nmiss = "wait"\n'
    path.write_text(f"[refresh]\ninterval = 8\ncount = 2\n{weights}")
    monkeypatch.setattr("qbe.engine.engine.Engine", lambda model, **options: made.update(options))
    monkeypatch.setenv("QBE_RECORDS", str(tmp_path / "records.sqlite"))
    _engine(Watched(path), "model", device_memory=None, miss="lower", compile=True, speculate=True)
    assert (made["refresh_interval"], made["refresh_count"], made["most_bits"]) == (8, 2, 6)
    assert made["rows"] == "shared"
    assert (made["device_memory"], made["miss"]) == ("12GiB", "lower")
    assert made["compile"]
    assert made["speculate"]
    made["records"].close()
