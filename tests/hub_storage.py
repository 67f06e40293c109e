"""The repositories behind the loopback Hub: commits of whole snapshots, branches, tags, pull requests."""

import hashlib
import json
from dataclasses import dataclass, field

from hub_http import HubError


@dataclass(frozen=True)
class StoredFile:
    """One version of one file."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def object_id(self) -> str:
        """What the client compares its local file with to leave out what has not changed."""
        return self.sha256 if self.is_lfs else self.blob_id

    def tree_entry(self, path: str) -> dict:
        entry = {"type": "file", "path": path, "size": len(self.content), "oid": self.blob_id}
        if self.is_lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass(frozen=True)
class Commit:
    """A snapshot of all files, with the commit it came from."""

    id: str
    title: str
    parent: str | None
    files: dict[str, StoredFile]

    def snapshot(self) -> dict:
        files = {path: None if file.is_lfs else file.content.decode() for path, file in self.files.items()}
        return {"id": self.id, "title": self.title, "files": files}


@dataclass
class Repository:
    """A model repository: commits and the branches, tags and pull requests that name them."""

    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        self.add_commit("refs/heads/main", "initial commit", {}, None)

    def add_commit(self, reference: str, title: str, files: dict[str, StoredFile], parent: str | None) -> Commit:
        seed = json.dumps([self.name, title, parent, len(self.commits), *sorted(files)])
        commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), title, parent, files)
        self.commits[commit.id] = commit
        self.references[reference] = commit.id
        return commit

    def resolve(self, revision: str) -> Commit:
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in self.references:
                return self.commits[self.references[name]]
        if revision in self.commits:
            return self.commits[revision]
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def file(self, revision: str, path: str) -> StoredFile:
        files = self.resolve(revision).files
        if path not in files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        return files[path]

    def history(self, revision: str) -> list[Commit]:
        commits, commit = [], self.resolve(revision)
        while commit:
            commits.append(commit)
            commit = self.commits.get(commit.parent)
        return commits

    def snapshot(self) -> dict:
        references = {name: [commit.snapshot() for commit in self.history(name)] for name in self.references}
        return {"private": self.private, "references": references}
