"""Packed files: round trip, bytes that depend on the content alone, and every kind of damage."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.errors import PackedError
from k3fuse.kernels.build.packed import MANIFEST, MOST, MOST_MEMBER, SCHEMA, load, pack, select
from workbench_cases import ARCHS, OP, STORED, gemv, made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.k3pack"
    pack([made(gemv(arch), cubin=arch.encode()) for arch in ARCHS], path)
    return path


def rewritten(path: Path, change: Any) -> Path:
    """The archive with `change(members)` applied; a member set to None is left out."""
    with zipfile.ZipFile(path) as archive:
        members: dict[str, Any] = {n: archive.read(n) for n in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)
    return path


def edited(path: Path, change: Any) -> Path:
    """The same with the manifest's document changed, its checksum left as it was."""

    def apply(members: dict[str, Any]) -> None:
        document = json.loads(members[MANIFEST])
        change(document)
        members[MANIFEST] = json.dumps(document).encode()

    return rewritten(path, apply)


def refused(path: Path) -> str:
    with pytest.raises(PackedError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_what_is_packed_is_loaded(file: Path) -> None:
    kernels = [
        replace(made(gemv(arch, pdl=pdl), cubin=bytes([pdl]) * 9), factors=(("a", "b"),))
        for arch in ARCHS
        for pdl in (0, 1)
    ]
    pack(kernels, file)
    assert load(file) == tuple(sorted(kernels, key=lambda k: k.variant))


def test_ptx_can_be_left_out(file: Path) -> None:
    pack([made()], file, ptx=False)
    (found,) = load(file)
    assert found == replace(made(), ptx="")


def test_the_bytes_depend_on_the_content_alone(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "sub/two", "three"))
    kernels = [made(gemv(arch)) for arch in ARCHS]
    pack(kernels, one)
    pack(reversed(kernels), two)
    pack([*kernels[:2], made(gemv(ARCHS[2]), cubin=b"other")], three)
    assert one.read_bytes() == two.read_bytes() != three.read_bytes()


def test_the_stored_file_is_still_read() -> None:
    found = load(STORED)
    assert sorted(k.variant.arch for k in found) == sorted(ARCHS)
    assert {k.plan for k in found} == {made().plan}
    assert all(k.cubin.startswith(b"\x7fELF") for k in found)


def test_another_schema(file: Path) -> None:
    text = refused(edited(file, lambda d: d.update(schema="k3fuse.kernels/2")))
    assert f"schema 'k3fuse.kernels/2', this version reads {SCHEMA!r}; pack it again" in text


def test_changed_descriptions(file: Path) -> None:
    text = refused(edited(file, lambda d: d["kernels"][0].update(entry="another")))
    assert "the checksum of its k3fuse.json is wrong; pack it again" in text


def test_a_changed_or_missing_cubin(file: Path) -> None:
    text = refused(rewritten(file, lambda m: m.update({"1.cubin": b"x"})))
    assert "the checksum of 1.cubin" in text
    assert "@sm_103a) is wrong; pack it again" in text
    assert "checksum of 1.cubin" in refused(rewritten(file, lambda m: m.update({"1.cubin": None})))


def test_a_file_without_a_manifest(file: Path) -> None:
    assert "has no k3fuse.json" in refused(rewritten(file, lambda m: m.update({MANIFEST: None})))


@pytest.mark.parametrize("text", [b"[", b"[]", b'{"schema": 1}'])
def test_a_manifest_of_another_form(file: Path, text: bytes) -> None:
    assert "damaged" in refused(rewritten(file, lambda m: m.update({MANIFEST: text})))


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "absent")
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "text").write_text("no zip")
    assert "no packed file" in refused(tmp_path / "text")


def test_every_flipped_byte_is_noticed_or_harmless(file: Path) -> None:
    whole, expected = file.read_bytes(), load(file)
    noticed = 0
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            assert load(file) == expected, at
        except PackedError:
            noticed += 1
    assert noticed > len(whole) / 7 / 2


def test_every_truncation_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for size in range(0, len(whole), 101):
        file.write_bytes(whole[:size])
        refused(file)


def claiming(path: Path, name: str, size: int) -> Path:
    """The archive whose directory says `size` bytes of one member."""
    whole = bytearray(path.read_bytes())
    record = whole.index(name.encode(), whole.index(b"PK\x01\x02")) - 46
    assert whole[record : record + 4] == b"PK\x01\x02"
    whole[record + 24 : record + 28] = size.to_bytes(4, "little")
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize("name", ["1.cubin", MANIFEST])
def test_a_member_that_claims_gigabytes_is_not_read(
    file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("read"))
    text = refused(claiming(file, name, 4_000_000_000))
    assert f"{name} has 4000000000 bytes, the limit is {MOST_MEMBER}; pack it again" in text


def test_members_that_claim_gigabytes_together_are_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in range(17):
        rewritten(file, lambda m, part=part: m.update({f"{part}.more": b""}))
    for part in range(17):
        claiming(file, f"{part}.more", MOST_MEMBER)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("read"))
    assert f"bytes, the limit is {MOST}; pack it again" in refused(file)


def test_limits_hold_for_what_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = file.read_bytes()
    monkeypatch.setattr(packed, "MOST_MEMBER", 8000)
    assert len(load(file)) == len(ARCHS)  # the control
    with pytest.raises(PackedError, match=r"0.cubin has 8001 bytes, .* pack fewer kernels"):
        pack([made(cubin=b"x" * 8001)], file)
    assert file.read_bytes() == whole


def test_select_finds_the_device_and_the_shape(file: Path) -> None:
    kernels = [*load(file), made(replace(gemv(), op="other"))]
    assert select(kernels, "sm_100a", OP).cubin == b"sm_100a"
    assert select(kernels, "sm_100a", OP, {"m": 2}).cubin == b"sm_100a"
    for arguments, message in (
        (("sm_90a", "other"), "for sm_103a, not for sm_90a; build and pack with --arch sm_90a"),
        (("sm_90a", "none"), "no kernel of op 'none' is packed; the file holds other, workbench"),
        (("sm_90a", OP, {"m": 3}), "none of the kernels of 'workbench_gemv' for sm_90a fit"),
    ):
        with pytest.raises(PackedError, match=message):
            select(kernels, *arguments)  # type: ignore[arg-type]
    twice = [*kernels, made(gemv("sm_90a", pdl=1))]
    with pytest.raises(PackedError, match=r"2 of the kernels .* there are m2_.*, m2_.*_pdl"):
        select(twice, "sm_90a", OP)


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(PackedError, match="no kernel to pack"):
        pack([], tmp_path / "x")
    with pytest.raises(PackedError, match="given twice"):
        pack([made(), made()], tmp_path / "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PackedError, match="cannot be written"):
        pack([made()], tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
