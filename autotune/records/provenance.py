"""Read the commit of the checkout that a run was made with."""

import subprocess


def git_sha() -> str:
    """Of the working directory; empty outside a repository."""
    try:
        made = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return made.stdout.strip() if made.returncode == 0 else ""
