"""Identify the version of the code that a run used."""

import subprocess


def git_sha() -> str:
    """Return the commit of the working directory; empty outside a repository."""
    try:
        process = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
