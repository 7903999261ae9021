"""Settings: flags over file over defaults, and one line naming whatever is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.address import Address
from kvstore.config import ServeConfig, WritePolicy, default_state_directory, load_config
from kvstore.errors import ConfigError
from kvstore.units import GIB, MIB


def test_no_arguments_are_enough() -> None:
    config = load_config({})
    assert len(config.listen) == 1
    assert config.listen[0].local
    assert 16 * MIB <= config.host_pool <= 4 * GIB
    assert config.lease_cap == config.grant_cap == config.host_pool // 2
    assert config.disk is None
    assert config.write_policy is WritePolicy.THROUGH


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('host-pool = "64MiB"\nstop_timeout = "3s"\nlisten = "127.0.0.1:7000"\n')
    config = load_config({"host_pool": "128MiB", "stop_timeout": None}, file)
    assert config.host_pool == 128 * MIB
    assert config.stop_timeout_s == 3.0
    assert config.listen == (Address(host="127.0.0.1", port=7000),)


def test_settings_are_frozen() -> None:
    config = load_config({"host_pool": "64MiB"})
    with pytest.raises(ValueError, match="frozen"):
        config.host_pool = 1


def test_relative_directories_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config({"state": "state", "disk": "~/disk"})
    assert config.state == tmp_path / "state"
    assert config.disk == Path.home() / "disk"


def test_a_user_keeps_state_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/.state")
    assert default_state_directory() == Path("/home/u/.state/kvstore")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/u")
    assert default_state_directory() == Path("/home/u/.local/state/kvstore")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_state_directory() == Path("/var/lib/kvstore")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"host_pol": 1}, r"host_pol: unknown setting \(did you mean host_pool\?\)"),
        ({"host_pool": "8XB"}, r"host_pool: '8XB' is not a size"),
        ({"host_pool": True}, "host_pool: True: should be a valid integer"),
        ({"host_pool": 5}, "host_pool: 5 is too little: at least 16 MiB; .* are bytes$"),
        ({"host_pool": "64k"}, "host_pool: '64k' is too little: at least 16 MiB$"),
        ({"host_pool": "-1GiB"}, "host_pool: '-1GiB' is not a size"),
        ({"host_pool": "9" * 400}, "host_pool: '99999999999999999999'… is more than any size"),
        ({"default_quota": "disk=99999999TiB"}, "default_quota: .*less than or equal to"),
        ({"default_quota": "host=-1"}, "default_quota: '-1' is not a size"),
        ({"default_quota": "tape=1GiB"}, "default_quota: 'tape' is not one of gpu, host, disk"),
        ({"default_quota": "host=1GiB, host=2GiB"}, "default_quota: .*host is given twice"),
        ({"default_ttl": "99999999999999d"}, "default_ttl: .*less than or equal to"),
        ({"default_ttl": "0"}, "default_ttl: .*greater than or equal to"),
        ({"lease_ttl": "50d"}, "lease_ttl: .*less than or equal to 86400"),
        ({"listen": []}, "listen: "),
        (
            {"listen": ["0.0.0.0:7000"]},
            r"listen: '0\.0\.0\.0:7000' is not a loopback address.*tunnel",
        ),
        ({"listen": ["box:7000"]}, "listen: 'box:7000': give an IP address"),
        ({"listen": ["nonsense"]}, "listen: 'nonsense' is neither"),
        ({"listen": ["127.0.0.1:1", "127.0.0.1:1"]}, "listen: names an address twice"),
        ({"metrics": "unix:///x"}, "metrics: 'unix:///x' is not host:port"),
        ({"metrics": "9405"}, "metrics: '9405' is not host:port"),
        (
            {"write_policy": "never"},
            "write_policy: 'never': should be 'through', 'reused' or 'evict'",
        ),
        ({"gpu_pool": "99%"}, "gpu_pool: '99%': must be within 0% … 95%"),
        ({"gpu_pool": "some%"}, "gpu_pool: 'some%': give a size, or a percentage"),
        ({"gpu_pool": "12"}, "gpu_pool: '12': at least 1 MiB"),
        ({"gpu_devices": "0,1"}, "gpu_devices: needs gpu_pool"),
        ({"disk": ""}, "disk: must not be empty"),
        ({"disk_capacity": "1GiB"}, "disk_capacity: needs disk"),
        ({"state": "/x", "disk": "/x"}, "disk: must not be the state directory"),
        ({"lease_ttl": "1s"}, "heartbeat: must be at most half of lease_ttl"),
        ({"stop_timeout": "soon"}, "stop_timeout: 'soon' is not a duration"),
        ({"stop_timeout": float("nan")}, "stop_timeout: "),
        ({"io_threads": 0}, "io_threads: 0: should be greater"),
        ({"log_level": "loud"}, "log_level: 'loud': should be"),
        ({"discard_host": "perhaps"}, "discard_host: 'perhaps': should be a valid boolean"),
    ],
)
def test_bad_settings_are_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        load_config(flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("host_pool = ", "config: .*not TOML"),
        ('host-pool = "1GiB"\nhost_pool = "2GiB"\n', "host_pool: given twice"),
        ('[server]\nlisten = "127.0.0.1:1"\n', "server: unknown setting"),
        ("\udcff", "config: .*not TOML"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        load_config({}, file)
    assert "\n" not in str(caught.value)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^config: .*nowhere.toml: No such file"):
        load_config({}, tmp_path / "nowhere.toml")


def test_bad_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match="^KVSTORE_ADDRESS: 'nonsense' is neither"):
        load_config({})


def test_every_flag_is_a_setting_and_back() -> None:
    """`kvstore serve` offers each setting, under its own name."""
    import inspect

    from kvstore.cli.serve import serve

    settings = {field.alias or name for name, field in ServeConfig.model_fields.items()}
    assert set(inspect.signature(serve).parameters) - {"config"} == settings
