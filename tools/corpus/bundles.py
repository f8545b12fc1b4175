# SPDX-License-Identifier: Apache-2.0
"""Makes the packs of pairs.json: runs of `isoshard verify --dump`, and edited copies of them."""

from __future__ import annotations

import array
import fnmatch
import hashlib
import io
import json
import lzma
import pathlib
import shutil
import tarfile
from collections.abc import Callable, Iterator

from answers import CorpusError, read_json
from programs import Programs

NOT_RUN = 4
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


def edit_values(bundle: pathlib.Path, edit: dict) -> int:
    """{"values": {...}}: elements [begin, end) of tensors times `factor`, plus `plus`, rolled."""

    def change(name: str, entry: dict, data: bytes) -> tuple[dict, bytes]:
        if not is_meant(name, edit):
            return entry, data
        code = _CODES.get(entry["dtype"])
        if code is None:
            raise CorpusError(f"{name}: values of dtype {entry['dtype']} cannot be edited")
        values = array.array(code, data)
        part = slice(edit.get("begin", 0), edit.get("end", len(values)))
        factor, plus, by = edit.get("factor", 1), edit.get("plus", 0), edit.get("roll", 0)
        new = [value * factor + plus for value in values[part]]
        values[part] = array.array(code, new[by:] + new[:by])
        return entry, values.tobytes()

    files = [path.with_suffix(".safetensors") for path in rank_files(bundle, edit)]
    return sum(edit_tensors(file, change) for file in files)


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


def edited(bundle: pathlib.Path, edits: list[dict], id: str) -> None:
    """Does all edits and seals the bundle.   Errors   CorpusError if one changes nothing."""
    for edit in edits:
        ((kind, words),) = edit.items()
        if EDITS[kind](bundle, words) == 0:
            raise CorpusError(f"{id}: the edit {json.dumps(edit)} changes nothing")
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


def make_runs(
    name: str, pack: dict, programs: Programs, corpus: pathlib.Path, folder: pathlib.Path
) -> None:
    """The bundles of one pack, below `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    origin = ""
    for run, row in pack["runs"].items():
        id, target = f"{name}/{run}", folder / run
        if "from" in row:
            shutil.copytree(folder / row["from"], target)
        else:
            dump = folder / ".dump"
            words = [*pack["verify"], *row["verify"]]
            bundles = dumped(words, programs, corpus, dump)
            reference = only(bundles["reference"], "reference", id)
            if origin not in ("", reference.name):
                raise CorpusError(
                    f"{id}: its reference must be that of the pack, {origin}, got {reference.name}"
                )
            if not origin:
                origin = reference.name
                reference.rename(folder / "reference")
            against = row.get("against", "reference")
            if not (folder / against).exists():
                only(bundles["emulated"], "emulated", id).rename(folder / against)
            only(bundles["judged"], "judged", id).rename(target)
            shutil.rmtree(dump)
        if "edits" in row:
            edited(target, row["edits"], id)


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
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28}]
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
        make_runs(name, packs[name], programs, corpus, folder)
        write_pack(folder, corpus / f"{name}.tar.xz")
    return made
