"""Addresses as people write them, and as gRPC wants them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.address import Address, default_address, machine_id, parse_address, runtime_directory
from kvstore.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("unix:///run/k.sock", Address(path="/run/k.sock"), "unix:///run/k.sock"),
        ("unix:/run/k.sock", Address(path="/run/k.sock"), "unix:///run/k.sock"),
        ("unix:///a/../b c%.sock", Address(path="/b c%.sock"), "unix:///b%20c%25.sock"),
        ("localhost:7000", Address(host="localhost", port=7000), "localhost:7000"),
        ("127.0.0.1:0", Address(host="127.0.0.1", port=0), "127.0.0.1:0"),
        ("[::1]:7000", Address(host="::1", port=7000), "[::1]:7000"),
    ],
)
def test_addresses_are_parsed(text: str, address: Address, target: str) -> None:
    assert parse_address(text) == address
    assert address.target == target
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "unix:", "unix://host/x", "localhost", "a:b", "h:99999", "http://h:1", "::1:80"]
)
def test_what_is_no_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidRequest, match="^address: ") as error:
        parse_address(text)
    assert "\n" not in str(error.value)


def test_relative_sockets_are_relative_to_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_address("unix:k.sock").path == str(tmp_path / "k.sock")


def test_daemon_and_clients_agree_where_the_default_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_address().path == "/run/user/7/kvstore/kvstore.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert default_address().path == str(runtime_directory() / "kvstore.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_address() == default_address()
    monkeypatch.setenv("KVSTORE_ADDRESS", "127.0.0.1:9")
    assert default_address() == Address(host="127.0.0.1", port=9)


def test_grpc_reaches_a_socket_with_odd_characters_in_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a b%20?#é.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(5)
        with grpc.insecure_channel(Address(path=str(path)).target) as channel:
            # Not channel_ready_future: its thread may still poll the channel when that closes.
            call: Any = channel.unary_unary("/any/Call", bytes, bytes)
            connecting = call.future(b"")
            listener.accept()[0].close()
            connecting.cancel()


def test_processes_of_one_machine_agree_on_its_id() -> None:
    assert machine_id() == machine_id() != ""
