"""A loopback Hub: enough of its HTTP API for the real `huggingface_hub` client, 1.x and 2.x, to push to and pull from.

Repositories live in memory. Files of more than `LFS_THRESHOLD` bytes or with a weight suffix take the LFS route: batch
request, one PUT or several of `PART_SIZE` bytes, then the commit names the sha256. Downloads of such files answer the
HEAD with a redirect and `X-Linked-Etag`, as the Hub's content network does.

The client must run with `HF_HUB_DISABLE_XET=1`: the Xet protocol is a second service of its own. `HF_ENDPOINT` and
`HF_HOME` are read when `huggingface_hub` is imported, so the client belongs in a process started with
`HubServer.environment(...)`.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import yaml
from hub_http import HubError, RoutedHandler
from hub_storage import Repository, StoredFile


LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".npz")
LFS_THRESHOLD = 10 * 1024**2
PART_SIZE = 64 * 1024  # small: a tiny model's weights take several parts
DATE = "2026-01-01T00:00:00.000Z"


class HubServer:
    """The server; use it as a context manager.

    `tokens` maps a token to its user, who may write below their own name and below `organizations` they belong to.
    """

    def __init__(self, tokens: dict[str, str], organizations: dict[str, list[str]] | None = None):
        self.tokens, self.organizations = tokens, organizations or {}
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        names = {"hub": self, "routes": ROUTES, "lock": threading.Lock(), "log": self.requests}
        handler = type("BoundHandler", (Handler,), names)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        port = self.server.server_address[1]
        # The second name stands for the content network: another host, which must never be sent a token.
        self.endpoint, self.storage = f"http://127.0.0.1:{port}", f"http://localhost:{port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, token: str | None = None, offline: bool = False) -> dict[str, str]:
        """The variables that point a client process at this server, with `home` as its cache."""
        variables = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        if token is not None:
            variables["HF_TOKEN"] = token
        return variables | {"HF_HUB_OFFLINE": "1" if offline else "0"}

    def snapshot(self) -> dict[str, dict]:
        """All repositories as JSON: each reference with its commits, newest first; large files without content."""
        return {name: repository.snapshot() for name, repository in self.repositories.items()}

    def may_write(self, user: str | None, name: str) -> bool:
        namespace = name.split("/")[0]
        return user is not None and (namespace == user or user in self.organizations.get(namespace, []))

    def readable(self, user: str | None, name: str) -> Repository:
        """The repository, or what the Hub answers when it does not exist or may not be known to exist."""
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not self.may_write(user, name)):
            if user is None:
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, user: str | None, name: str) -> Repository:
        repository = self.readable(user, name)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if not self.may_write(user, name):
            raise HubError(403, f"Forbidden: you must use a write token to upload to {name}")
        return repository


class Handler(RoutedHandler):
    """The Hub's routes."""

    hub: HubServer

    @property
    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    # Account and repositories

    def whoami(self) -> dict:
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        organizations = [{"name": name} for name, users in self.hub.organizations.items() if self.user in users]
        return {"type": "user", "name": self.user, "orgs": organizations, "auth": {"type": "access_token"}}

    def create_repository(self) -> dict:
        request = json.loads(self.body)
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        name = f"{request.get('organization') or self.user}/{request['name']}"
        if not self.hub.may_write(self.user, name):
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{name}"')
        answer = {"url": f"{self.hub.endpoint}/{name}", "name": name}
        if name in self.hub.repositories:
            self.reply(409, answer | {"error": "You already created this model repo"})
            return None
        private = bool(request.get("private")) or request.get("visibility") == "private"
        self.hub.repositories[name] = Repository(name, private=private)
        return answer

    def validate_yaml(self) -> dict | None:
        match = re.match(r"---\n(.*?)\n---", json.loads(self.body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError as error:
            self.reply(400, {"errors": [{"message": str(error)}], "warnings": []})
            return None
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return {"errors": [], "warnings": warnings}

    # Reading

    def model_info(self, name: str, revision: str = "main") -> dict:
        repository = self.hub.readable(self.user, name)
        commit = repository.resolve(revision or "main")
        description = {"_id": commit.id[:24], "id": name, "modelId": name, "author": name.split("/")[0]}
        description |= {"sha": commit.id, "private": repository.private, "gated": repository.gated, "disabled": False}
        description |= {"lastModified": DATE, "createdAt": DATE, "downloads": 0, "likes": 0, "tags": []}
        return description | {"siblings": [{"rfilename": path} for path in sorted(commit.files)]}

    def tree(self, name: str, revision: str, folder: str = "") -> list:
        files = self.hub.readable(self.user, name).resolve(revision).files
        prefix = folder.strip("/") + "/" if folder.strip("/") else ""
        inside = {path: file for path, file in files.items() if path.startswith(prefix)}
        entries, folders = [], set()
        for path, file in sorted(inside.items()):
            head, *rest = path.removeprefix(prefix).split("/")
            if rest:
                folders.add(prefix + head)
            if not rest or "recursive" in self.query:
                entries.append(file.tree_entry(path))
        return [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)] + entries

    def list_references(self, name: str) -> dict:
        listing = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
        kinds = {"heads": "branches", "tags": "tags", "pr": "pullRequests"}
        for reference, commit in self.hub.readable(self.user, name).references.items():
            _, kind, short = reference.split("/", 2)
            listing[kinds[kind]].append({"name": short, "ref": reference, "targetCommit": commit})
        return listing

    def list_commits(self, name: str, revision: str) -> list:
        history = self.hub.readable(self.user, name).history(revision)
        return [
            {"id": commit.id, "title": commit.title, "message": "", "date": DATE, "authors": []} for commit in history
        ]

    def resolve_file(self, name: str, revision: str, path: str) -> None:
        repository = self.hub.readable(self.user, name)
        if repository.gated and not self.hub.may_write(self.user, name):
            raise HubError(403, f"Access to model {name} is restricted.", "GatedRepo")
        headers = {"X-Repo-Commit": repository.resolve(revision).id}
        file = repository.file(revision, path)
        if file.is_lfs:
            self.hub.large_files[file.sha256] = file.content
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
            headers["Location"] = f"{self.hub.storage}/large-files/{file.sha256}"
            return self.reply(302, b"", headers)
        return self.send_file(file.content, headers | {"ETag": f'"{file.blob_id}"'})

    def download_large_file(self, sha256: str) -> None:
        if "Authorization" in self.headers:
            raise HubError(400, "Only one auth mechanism allowed")
        self.send_file(self.hub.large_files[sha256], {"ETag": f'"{sha256}"'})

    # Writing

    def preupload(self, name: str, revision: str) -> dict:
        create_pull_request = "create_pr" in self.query
        repository = (self.hub.readable if create_pull_request else self.hub.writable)(self.user, name)
        present = repository.resolve(revision).files
        answers = []
        for file in json.loads(self.body)["files"]:
            is_lfs = file["path"].endswith(LFS_SUFFIXES) or file["size"] > LFS_THRESHOLD
            answer = {"path": file["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if file["path"] in present:
                answer["oid"] = present[file["path"]].object_id
            answers.append(answer)
        return {"files": answers}

    def large_file_batch(self, name: str) -> dict:
        self.hub.readable(self.user, name)
        objects = []
        for item in json.loads(self.body)["objects"]:
            answer = {"oid": item["oid"], "size": item["size"], "authenticated": True}
            if item["oid"] not in self.hub.large_files:
                answer["actions"] = {"upload": self.upload_action(item["oid"], item["size"])}
            objects.append(answer)
        return {"transfer": "multipart", "objects": objects}

    def upload_action(self, sha256: str, size: int) -> dict:
        url = f"{self.hub.storage}/large-files/{sha256}"
        if size <= PART_SIZE:
            return {"href": url}
        parts = {str(part): f"{url}/{part}" for part in range(1, -(-size // PART_SIZE) + 1)}
        return {"href": f"{url}/complete", "header": {"chunk_size": str(PART_SIZE)} | parts}

    def upload_large_file(self, sha256: str) -> bytes:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise HubError(400, "The content does not match its sha256")
        self.hub.large_files[sha256] = self.body
        return b""

    def upload_part(self, sha256: str, part: str) -> None:
        self.hub.parts.setdefault(sha256, {})[int(part)] = self.body
        self.reply(200, b"", {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def complete_upload(self, sha256: str) -> dict:
        listed = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        parts = self.hub.parts.pop(sha256)
        self.body = b"".join(parts[number] for number in listed)
        self.upload_large_file(sha256)
        return {}

    def commit(self, name: str, revision: str) -> dict:
        create_pull_request = "create_pr" in self.query
        repository = (self.hub.readable if create_pull_request else self.hub.writable)(self.user, name)
        parent = repository.resolve(revision)
        files, title = dict(parent.files), ""
        for line in filter(None, self.body.split(b"\n")):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                title = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = StoredFile(base64.b64decode(value["content"]), is_lfs=False)
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.large_files:
                    raise HubError(400, f"{value['path']}: its content has not been uploaded")
                files[value["path"]] = StoredFile(self.hub.large_files[value["oid"]], is_lfs=True)
            elif entry["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise HubError(400, f"Unknown commit entry {entry['key']}")
        number = 1 + sum(reference.startswith("refs/pr/") for reference in repository.references)
        reference = f"refs/pr/{number}" if create_pull_request else self.branch_reference(repository, revision)
        commit = repository.add_commit(reference, title, files, parent.id)
        answer = {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit.id}", "commitOid": commit.id}
        if create_pull_request:
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{name}/discussions/{number}"
        return answer

    @staticmethod
    def branch_reference(repository: Repository, revision: str) -> str:
        reference = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        if reference not in repository.references:
            raise HubError(400, f"Commits go to a branch; {revision} is not one")
        return reference

    def create_branch(self, name: str, branch: str) -> dict:
        return self.create_reference(name, f"refs/heads/{branch}", json.loads(self.body or b"{}").get("startingPoint"))

    def create_tag(self, name: str, revision: str) -> dict:
        return self.create_reference(name, f"refs/tags/{json.loads(self.body)['tag']}", revision)

    def create_reference(self, name: str, reference: str, start: str | None) -> dict:
        repository = self.hub.writable(self.user, name)
        if reference in repository.references:
            raise HubError(409, f"Reference already exists: {reference}")
        repository.references[reference] = repository.resolve(start or "main").id
        return {}


NAME = r"(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/repos/create", "create_repository"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("GET", f"/api/models/{NAME}", "model_info"),
    ("GET", f"/api/models/{NAME}/revision/{REVISION}", "model_info"),
    ("GET", f"/api/models/{NAME}/tree/{REVISION}(?P<folder>/.*)?", "tree"),
    ("GET", f"/api/models/{NAME}/refs", "list_references"),
    ("GET", f"/api/models/{NAME}/commits/{REVISION}", "list_commits"),
    ("POST", f"/api/models/{NAME}/branch/(?P<branch>[^/]+)", "create_branch"),
    ("POST", f"/api/models/{NAME}/tag/{REVISION}", "create_tag"),
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}", "preupload"),
    ("POST", f"/api/models/{NAME}/commit/{REVISION}", "commit"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "large_file_batch"),
    ("PUT", "/large-files/(?P<sha256>[0-9a-f]{64})", "upload_large_file"),
    ("PUT", r"/large-files/(?P<sha256>[0-9a-f]{64})/(?P<part>\d+)", "upload_part"),
    ("POST", "/large-files/(?P<sha256>[0-9a-f]{64})/complete", "complete_upload"),
    ("GET HEAD", "/large-files/(?P<sha256>[0-9a-f]{64})", "download_large_file"),
    ("GET HEAD", f"/{NAME}/resolve/{REVISION}/(?P<path>.+)", "resolve_file"),
]
