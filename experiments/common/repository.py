"""Commit of the code that makes a result, and changes that are not committed."""

import subprocess
from pathlib import Path

CODE = (
    "autotune",
    "experiments",
    "configs",
    ":(exclude,glob)experiments/**/results/**",
    ":(exclude,glob)experiments/**/*.md",
)
"""Paths of the code. Their latest commit identifies it; results and pages are excluded, so committing them changes nothing."""
CHANGED = "+changes"
"""End of a commit in a result file whose code had changes that were not committed."""


def run_git(root: Path, *arguments: str) -> str:
    """Return the output of a git command in a checkout; SystemExit if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {arguments[0]} failed: {done.stderr.strip()}; run from a checkout of the project")
    return done.stdout.strip()


def find_changes(root: Path) -> list[str]:
    """Return the lines of `git status` about tracked files of `CODE`; SystemExit if git fails."""
    return run_git(root, "status", "--porcelain", "--untracked-files=no", "--", *CODE).splitlines()


def name_commit(root: Path) -> str:
    """Return the short hash of the checkout's commit, with `CHANGED` behind it for changed code; `unknown` without git."""
    try:
        commit = run_git(root, "rev-parse", "--short", "HEAD")
        return f"{commit}{CHANGED}" if find_changes(root) else commit
    except (SystemExit, FileNotFoundError):
        return "unknown"
