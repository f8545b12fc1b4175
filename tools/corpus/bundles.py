# SPDX-License-Identifier: Apache-2.0
"""Makes the packs of pairs.json: runs of `isoshard verify --dump`, and edited copies of them."""

from __future__ import annotations

import array
import fnmatch
import hashlib
import io
import json
import lzma
import math
import pathlib
import shutil
import tarfile
from collections.abc import Callable, Iterator

from answers import CorpusError, read_json, write_text
from programs import NOT_RUN, Programs

_CODES = {"F32": "f", "F64": "d", "I64": "q", "I32": "i"}


def is_meant(name: str, edit: dict) -> bool:
    """Whether an edit's "tensors" pattern, KIND/NAME/CALL, fits."""
    return fnmatch.fnmatchcase(name, edit["tensors"])


def rank_files(bundle: pathlib.Path, edit: dict) -> Iterator[pathlib.Path]:
    """rankNNNNN.json of the ranks and steps that an edit is about; all by default."""
    for path in sorted(bundle.glob("step*/rank*.json")):
        rank, step = int(path.stem.removeprefix("rank")), int(path.parent.name.removeprefix("step"))
        if rank in edit.get("ranks", [rank]) and step in edit.get("steps", [step]):
            yield path


def tensors_of(file: pathlib.Path) -> dict[str, bytes]:
    """The bytes of each tensor of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}


def edit_tensors(
    file: pathlib.Path, change: Callable[[str, dict, bytes], tuple[dict, bytes] | None]
) -> int:
    """Replaces tensors of a safetensors file; None drops one. Returns how many changed."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", None)
    new_header, new_data, changed = {}, bytearray(), 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        old = (entry, data[slice(*entry["data_offsets"])])
        new = change(name, *old)
        changed += new != old
        if new is None:
            continue
        begin = len(new_data)
        new_data += new[1]
        new_header[name] = new[0] | {"data_offsets": [begin, len(new_data)]}
    if metadata is not None:
        new_header = {"__metadata__": metadata} | new_header
    text = json.dumps(new_header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + new_data)
    return changed


def with_bits(value: float, bits: int) -> float:
    """Rounded to so many significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def edit_values(bundle: pathlib.Path, edit: dict) -> int:
    """{"values": {...}}: elements [begin, end) of tensors get new values.

    `factor` times the old value plus `plus`, plus each tensor of `add` (`tensor`, `times` and,
    where it is not the same, `step`), rolled by `roll`, rounded to `bits`.
    """

    def change_file(path: pathlib.Path) -> int:
        def added(term: dict) -> array.array:
            folder = f"step{term['step']:04}" if "step" in term else path.parent.name
            file = bundle / folder / path.with_suffix(".safetensors").name
            return array.array("f", tensors_of(file)[term["tensor"]])

        terms = [(term.get("times", 1), added(term)) for term in edit.get("add", ())]

        def change(name: str, entry: dict, data: bytes) -> tuple[dict, bytes]:
            if not is_meant(name, edit):
                return entry, data
            code = _CODES.get(entry["dtype"])
            if code is None:
                raise CorpusError(f"{name}: values of dtype {entry['dtype']} cannot be edited")
            values = array.array(code, data)
            begin, end = edit.get("begin", 0), min(edit.get("end", len(values)), len(values))
            factor, plus, by = edit.get("factor", 1), edit.get("plus", 0), edit.get("roll", 0)
            new = [
                values[i] * factor + plus + sum(times * other[i] for times, other in terms)
                for i in range(begin, end)
            ]
            if "bits" in edit:
                new = [with_bits(value, edit["bits"]) for value in new]
            values[begin:end] = array.array(code, new[by:] + new[:by])
            return entry, values.tobytes()

        return edit_tensors(path.with_suffix(".safetensors"), change)

    return sum(map(change_file, rank_files(bundle, edit)))


def edit_records(bundle: pathlib.Path, edit: dict) -> int:
    """{"records": {...}}: drops records with their tensors, or sets fields (null deletes one)."""
    changed = 0
    for path in rank_files(bundle, edit):
        content = json.loads(path.read_text())
        kept = []
        for record in content["records"]:
            name = f"{record['kind']}/{record['name']}/{record.get('call', 0)}"
            if not is_meant(name, edit):
                kept.append(record)
                continue
            changed += 1
            if edit.get("drop"):
                continue
            record |= edit.get("set", {})
            kept.append({k: v for k, v in record.items() if v is not None})
        content["records"] = kept
        path.write_text(json.dumps(content))
        if edit.get("drop"):
            edit_tensors(
                path.with_suffix(".safetensors"),
                lambda name, entry, data: None if is_meant(name, edit) else (entry, data),
            )
    return changed


def edit_json(bundle: pathlib.Path, edit: dict) -> int:
    """{"json": {...}}: sets values of a file by their paths, such as "mesh.0.degree"."""
    file = bundle / edit["file"]
    content = json.loads(file.read_text())
    for place, value in edit["set"].items():
        *way, last = [int(key) if key.isdigit() else key for key in place.split("/")]
        part = content
        for key in way:
            part = part[key]
        if value is None:
            del part[last]
        else:
            part[last] = value
    file.write_text(json.dumps(content))
    return 1


def edit_files(bundle: pathlib.Path, edit: dict) -> int:
    """{"files": {...}}: removes files, or takes one of them for another."""
    paths = sorted(bundle.glob(edit["remove"])) if "remove" in edit else []
    for path in paths:
        path.unlink()
    if "copy" in edit:
        shutil.copyfile(bundle / edit["copy"][0], bundle / edit["copy"][1])
    return len(paths) + ("copy" in edit)


EDITS = {
    "values": edit_values,
    "records": edit_records,
    "json": edit_json,
    "files": edit_files,
}


def seal(bundle: pathlib.Path) -> None:
    """Writes the hashes of all files into the manifest."""
    manifest = bundle / "manifest.json"
    if not manifest.exists():
        return
    content = json.loads(manifest.read_text())
    content["files"] = {
        path.relative_to(bundle).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(bundle.rglob("*"))
        if path.is_file() and path != manifest
    }
    manifest.write_text(json.dumps(content))


def edited(bundle: pathlib.Path, edits: list[dict], id: str, sealed: bool = True) -> None:
    """Does all edits and seals the bundle.   Errors   CorpusError if one changes nothing."""
    for edit in edits:
        ((kind, words),) = edit.items()
        if EDITS[kind](bundle, words) == 0:
            raise CorpusError(f"{id}: the edit {json.dumps(edit)} changes nothing")
    if sealed:
        seal(bundle)


def dumped(
    words: list[str], programs: Programs, corpus: pathlib.Path, folder: pathlib.Path
) -> dict[str, list[pathlib.Path]]:
    """What `isoshard verify WORDS --dump` writes: reference, emulated and judged bundles."""
    done = programs.run("isoshard", ["verify", *words, "--dump", str(folder)], corpus)
    if done.returncode not in (0, 1):
        raise CorpusError(f"isoshard verify {' '.join(words)}: {done.stderr.strip()}", NOT_RUN)
    bundles: dict[str, list[pathlib.Path]] = {"reference": [], "emulated": [], "judged": []}
    for bundle in sorted(path for path in folder.iterdir() if path.is_dir()):
        kind = bundle.name.split("_")[0]
        bundles[kind if kind in bundles else "judged"].append(bundle)
    return bundles


def only(bundles: list[pathlib.Path], what: str, id: str) -> pathlib.Path:
    """The one bundle of a kind."""
    if len(bundles) != 1:
        raise CorpusError(f"{id}: must dump one {what} bundle, got {[b.name for b in bundles]}")
    return bundles[0]


def take(bundle: pathlib.Path, folder: pathlib.Path) -> str:
    """Moves a trusted bundle to `folder`, if it is not there. Returns its name there.

    The name that isoshard gives it has the digest of its settings, so that one that is there is the
    same.
    """
    if not (folder / bundle.name).exists():
        bundle.rename(folder / bundle.name)
    return bundle.name


def make_run(
    name: str, run: str, pack: dict, programs: Programs, corpus: pathlib.Path, folder: pathlib.Path
) -> str:
    """The bundle of one run, below `folder`. Returns the name of its reference."""
    row, id, dump = pack["runs"][run], f"{name}/{run}", folder / ".dump"
    bundles = dumped([*pack["verify"], *row["verify"]], programs, corpus, dump)
    against = row.get("against", "reference")
    trusted = take(only(bundles[against], against, id), folder)
    only(bundles["judged"], "judged", id).rename(folder / run)
    shutil.rmtree(dump)
    return trusted


def make_pack(
    name: str, pack: dict, programs: Programs, corpus: pathlib.Path, folder: pathlib.Path
) -> None:
    """The bundles of one pack, below `folder`, and index.json: the reference of each run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trusted: dict[str, str] = {}
    for run, row in pack["runs"].items():
        if "from" in row:
            shutil.copytree(folder / row["from"], folder / run)
            trusted[run] = trusted[row["from"]]
        else:
            trusted[run] = make_run(name, run, pack, programs, corpus, folder)
        if "reference_edits" in row:
            own = f"{run}.reference"
            shutil.copytree(folder / trusted[run], folder / own)
            trusted[run] = own
            edited(folder / own, row["reference_edits"], f"{name}/{run}")
        if "edits" in row:
            edited(folder / run, row["edits"], f"{name}/{run}", row.get("sealed", True))
    write_text(folder / "index.json", json.dumps(trusted, indent=1))


def write_pack(folder: pathlib.Path, pack: pathlib.Path) -> None:
    """The same bytes for the same bundles."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o644
        return member

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        # Files of one name beside each other: copies are found by the distance that they are apart.
        for path in sorted(folder.rglob("*"), key=lambda p: (p.suffix, p.name, p)):
            if path.is_file():
                archive.add(path, path.relative_to(folder).as_posix(), filter=plain)
    # fp32 and fp64 values are aligned to 4 bytes
    filters = [
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}
    ]
    pack.write_bytes(lzma.compress(stream.getvalue(), filters=filters))


def record_bundles(
    corpus: pathlib.Path, programs: Programs, scratch: pathlib.Path, names: list[str]
) -> list[str]:
    """Makes the packs `names`, or those that are missing. Returns what was made."""
    packs = read_json(corpus / "pairs.json")["packs"]
    for name in names:
        if name not in packs:
            raise CorpusError(f"{name}: must be a pack of pairs.json ({', '.join(packs)})", 2)
    made = names or [name for name in packs if not (corpus / f"{name}.tar.xz").exists()]
    for name in made:
        folder = scratch / name
        make_pack(name, packs[name], programs, corpus, folder)
        write_pack(folder, corpus / f"{name}.tar.xz")
    return made
