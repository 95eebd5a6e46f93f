"""The files that are linted, and a cache of what slow tools said about them."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess

CPP = (".h", ".cc", ".cpp", ".cu", ".cuh")
SKIPPED_FOLDERS = {".git", "build", ".venv", "__pycache__"}


class Tree:
    """Every text file of a checkout (tracked, or new and not ignored) by its path from the root."""

    def __init__(self, root):
        self.root = root
        self.texts = {}
        for path in self._paths():
            try:
                with open(os.path.join(root, path), encoding="utf-8") as file:
                    self.texts[path] = file.read()
            except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
                continue  # binary, or deleted since git listed it

    def _paths(self):
        if os.path.exists(os.path.join(self.root, ".git")) and shutil.which("git"):
            listed = subprocess.run(["git", "-C", self.root, "ls-files", "-co", "--exclude-standard", "-z"],
                                    capture_output=True, text=True)
            if listed.returncode == 0:  # else a checkout that git will not read, of another user for instance
                return sorted(set(filter(None, listed.stdout.split("\0"))))
        found = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            found += [os.path.relpath(os.path.join(folder, name), self.root) for name in files]
        return sorted(found)

    def cpp(self, *folders):
        """C++ files, of these folders or of all."""
        return [p for p in self.texts if p.endswith(CPP) and (not folders or p.startswith(tuple(folders)))]

    def hash(self, paths, *more):
        digest = hashlib.sha256()
        for path in paths:
            digest.update(path.encode() + b"\0" + self.texts[path].encode() + b"\0")
        for piece in more:
            digest.update(piece.encode() + b"\0")
        return digest.hexdigest()


class Cache:
    """Results by the hash of everything they depend on. What a run did not use is forgotten at its end."""

    def __init__(self, folder):
        self.folder = folder
        self.used = set()
        os.makedirs(folder, exist_ok=True)

    def knows(self, key):
        return os.path.exists(os.path.join(self.folder, key))

    def get(self, key, compute):
        self.used.add(key)
        path = os.path.join(self.folder, key)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        value = compute()
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(path + ".part", path)
        return value

    def forget_unused(self):
        for name in set(os.listdir(self.folder)) - self.used:
            os.remove(os.path.join(self.folder, name))


# Split, so that this file passes its own rule.
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:wo" r"rk|ho" r"me/\w+|ro" r"ot)/")


def hygiene(path, text):
    """(line, message): nothing unfinished, nothing that belongs to one machine."""
    host = socket.gethostname()
    # A short or common host name would match ordinary words.
    named = re.compile(rf"\b{re.escape(host)}\b") if len(host) >= 8 and host != "localhost" else None
    for number, line in enumerate(text.split("\n"), 1):
        if UNFINISHED.search(line):
            yield number, "unfinished work is an issue, not a comment"
        if MACHINE_PATH.search(line):
            yield number, "a path of one machine"
        if named and named.search(line):
            yield number, "the name of a machine"
