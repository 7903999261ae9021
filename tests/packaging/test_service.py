"""The service's unit and settings fit together, and are ones that the daemon takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from kvstore.config import load_config
from kvstore.units import parse_seconds

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "packaging" / "kvstore.service").read_text()
SETTINGS = ROOT / "packaging" / "kvstore.toml"
GUIDE = (ROOT / "docs" / "operations.md").read_text()


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_unit_and_settings_fit_together() -> None:
    config = load_config({}, SETTINGS)
    assert config.disk is not None
    assert setting("ReadWritePaths") == str(config.disk)
    assert str(config.state) == f"/var/lib/{setting('StateDirectory')}"
    (address,) = config.listen
    assert Path(address.path).parent == Path("/run") / setting("RuntimeDirectory")
    assert f"KVSTORE_ADDRESS={address}" in GUIDE
    # A stop that flushes for as long as it may must not be cut short.
    assert parse_seconds(setting("TimeoutStopSec").removesuffix("s")) > config.stop_timeout_s + 10
    # It is the daemon that says when it serves.
    assert setting("Type") == "notify"


def test_every_commented_setting_is_one(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=\w+ = )", "", SETTINGS.read_text(), flags=re.MULTILINE)
    assert text != SETTINGS.read_text()
    file = tmp_path / "every-setting.toml"
    file.write_text(text)
    config = load_config({}, file)
    assert config.write_policy == "reused"
    assert config.disk_budget == 1 << 40


def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    """Where there is no systemd to ask, what it asks for first: sections and keys."""
    unit = tmp_path / "kvstore.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    lines = [line for line in unit.read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if line[0] == "["] == ["[Unit]", "[Service]", "[Install]"]
    assert all(line[0] == "[" or re.fullmatch(r"[A-Z]\w+=.*", line) for line in lines)
    systemd = shutil.which("systemd-analyze")
    if systemd is not None:
        done = subprocess.run(
            [systemd, "verify", str(unit)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "kvstore.service" in done.stderr) == (0, False), done.stderr
