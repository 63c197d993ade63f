"""`optstream plan`: exit codes, text, JSON, and that it agrees with the doctor and with itself."""

from __future__ import annotations

import json

import pytest


def test_a_number(command, place):
    outcome = command("plan", "7B", "--optimizer", "adamw")
    assert (outcome.code, outcome.err) == (0, "")
    for part in ("7,000,000,000 parameters in bfloat16", "12.00 bytes a parameter", "78.2 GiB"):
        assert part in outcome.out
    assert 'window="256MiB"' in outcome.out
    assert list(place.iterdir()) == []


def test_everything_is_in_the_object(command):
    argv = ("--optimizer", "sgd", "--device", "cpu", "--window", "64MiB", "--dtype", "float32")
    node = ("--bandwidth", "2GB/s", "--space", "1TB", "--memory", "64GiB", "--step-time", "10")
    outcome = command("plan", "1e9", *argv, *node, "--endurance", "1PB", "--json")
    facts = json.loads(outcome.out)
    assert outcome.code == 0
    (rank,) = facts["ranks"]
    assert facts["most_of_a_rank"] == rank
    assert rank["state_bytes"] == 4 * 10**9
    moved = rank["read_bytes_per_step"] + rank["written_bytes_per_step"]
    assert facts["drive_s_per_step"] == pytest.approx(moved / 2e9)
    assert facts["written_bytes_per_day"] == pytest.approx(rank["written_bytes_per_step"] * 8640)
    assert facts["endurance_days"] == pytest.approx(1e15 / facts["written_bytes_per_day"])
    assert [check["fits"] for check in facts["checks"]] == [True, True, True]


def test_ram_saves_traffic_and_is_part_of_the_advice(command):
    without, with_ram = (
        json.loads(command("plan", "1B", "--json", *ram).out)["most_of_a_rank"]
        for ram in ((), ("--ram", "40%"))
    )
    assert without["resident_bytes"] == 0
    assert with_ram["resident_bytes"] > 0.35 * with_ram["state_bytes"]
    saved = without["written_bytes_per_step"] - with_ram["written_bytes_per_step"]
    assert saved == with_ram["resident_bytes"]
    assert ', ram="40%")' in command("plan", "1B", "--ram", "40%").out


def test_codecs(command):
    from optstream.cli.plan import CODECS
    from optstream.codecs.choice import NAMES

    assert CODECS == NAMES
    per_param = {}
    for codec in CODECS:
        out = command("plan", "1B", "--optimizer", "adamw", "--codec", codec).out
        per_param[codec] = float(out.split(" bytes a parameter")[0].split()[-1])
        assert (f', codec="{codec}"' in out) == (codec != "exact")
    wanted = {"exact": 12, "split": 10, "bf16": 6, "bf16-stochastic": 6, "int8": 4.07}
    assert per_param == pytest.approx(wanted, abs=0.02)
    outcome = command("plan", "1B", "--codec", "split", "--dtype", "float32")
    assert (outcome.code, outcome.out) == (1, "")
    assert "fits no state" in outcome.err


def test_memory_that_is_left_is_offered(command):
    out = command("plan", "7B", "--memory", "64GiB").out
    spare = out.split('ram="')[1].split("GiB")[0]
    assert command("plan", "7B", "--memory", "64GiB", "--ram", f"{spare}GiB").code == 0
    assert "would spare" not in command("plan", "7B", "--memory", "64GiB", "--ram", "1GiB").out
    assert "would spare" not in command("plan", "7B").out


def test_ranks(command):
    argv = ("plan", "1B", "--ranks", "4", "--ranks-per-node", "2", "--space", "1TB")
    facts = json.loads(command(*argv, "--json").out)
    alone = json.loads(command("plan", "1B", "--json").out)["ranks"][0]
    assert len(facts["ranks"]) == 4
    assert sum(rank["state_bytes"] for rank in facts["ranks"]) == alone["state_bytes"]
    assert facts["checks"][0]["needed"] < 0.6 * alone["drive_bytes"]
    out = command(*argv).out
    assert "4, 2 on a node; the figures below are the most of any of them" in out
    assert "process_group=dist.group.WORLD" in out


def test_what_does_not_fit_is_an_error_with_advice(command):
    outcome = command("plan", "7B", "--space", "100GiB", "--memory", "600MiB")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "drive, with a checkpoint kept needs" in outcome.err
    assert "host memory needs" in outcome.err
    assert "give --window" in outcome.err
    assert "does not fit" in outcome.out


def test_the_window_that_is_advised_fits(command):
    outcome = command("plan", "7B", "--memory", "600MiB")
    window = outcome.err.split("give --window ")[1].split()[0]
    assert command("plan", "7B", "--memory", "600MiB", "--window", window).code == 0


def test_a_doctor_s_findings(command, place):
    found = command("doctor", "--quick", "--json", place / "state").out
    (place / "doctor.json").write_text(found)
    outcome = command("plan", "1M", "--doctor", "doctor.json", "--bandwidth", "1GB")
    assert (outcome.code, outcome.err) == (0, "")
    assert f'offload(optimizer, "{place}/state", model=model, ' in outcome.out
    assert "io_threads=4" in outcome.out
    assert "1.00 GB/s" in outcome.out
    assert "fits" in outcome.out


def test_no_model(command, place):
    outcome = command("plan", "nowhere")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "optstream: model nowhere is no number of parameters, and nowhere is not there; give a "
        'number such as "7B", a config.json, or the directory of a model that has one\n'
    )
    outcome = command("plan", place)
    assert "/config.json is not there" in outcome.err


def test_large_windows_are_said_once(command, caplog):
    outcome = command("plan", "1B", "--window", "1MiB", "--memory", "6GiB")
    assert (outcome.err, caplog.messages) == ("", [])
    assert ", the largest " in outcome.out
