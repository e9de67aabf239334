"""Check and mask the address of an MLflow server or database, which may carry a password."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from autotune.errors import ConfigError

PUBLIC_KEYS = frozenset(
    {"user", "host", "port", "dbname", "sslmode", "application_name", "connect_timeout", "workflowType"}
)
"""Keys of a query whose values may be shown; every other value could be a password or a token."""

_NAME = re.compile(r"[\w.+-]+")
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*)://([^\s'\"<>]*)")
_SQLITE_FILE = re.compile(r"sqlite(\+\w+)?:///")


def sqlite_address(path: Path) -> str:
    """Return the address of an SQLite file, with escapes where its path has characters with a meaning in an address.

    >>> sqlite_address(Path("runs/mlflow.db")), sqlite_address(Path("what?/mlflow.db"))
    ('sqlite:///runs/mlflow.db', 'sqlite+pysqlite:///what%3F/mlflow.db')
    """
    from sqlalchemy import URL, make_url

    plain = f"sqlite:///{path}"
    if make_url(plain).database == str(path) and not set("{}") & set(plain):  # Optuna replaces braces
        return plain
    # with the driver, or MLflow would create the directories of the path without its escapes replaced
    return URL.create("sqlite+pysqlite", database=str(path)).render_as_string()


def sqlite_file(address: str) -> Path | None:
    """Return the file of an SQLite address, with its escapes replaced; None for any other address.

    >>> sqlite_file("sqlite+pysqlite:///what%3F/mlflow.db")
    PosixPath('what?/mlflow.db')
    """
    from sqlalchemy import make_url

    return Path(make_url(address).database or "") if _SQLITE_FILE.match(address) else None


def mask_secrets(text: str) -> str:
    """Return a text in which every address has `***` in place of its password, its token and unknown values of its query.

    >>> mask_secrets("no answer from postgresql://me:s3c/r@et@server/runs?password=x")
    'no answer from postgresql://me:***@server/runs?password=***'
    """
    return _ADDRESS.sub(_mask_address, text)


def without_credentials(uri: str) -> str:
    """Return the address of a server without user, password, query and fragment: a page that a browser can open.

    >>> without_credentials("http://me:secret@server:5000/?token=x")
    'http://server:5000/'
    """
    scheme, rest = uri.partition("://")[::2]
    place = re.split(r"[?#]", rest)[0]
    return f"{scheme}://{place.rpartition('@')[2]}"


def has_secret(uri: str) -> bool:
    """Return whether an address carries a password, a token, or a value of its query that could be one."""
    return "***" in mask_secrets(uri)


def check_address(uri: str) -> None:
    """Raise ConfigError, without the secret, for an address that cannot be taken apart in one way only."""
    remedy = "write %2F for /, %40 for @, %3A for : and %23 for # in a password"
    _, separator, rest = uri.partition("://")
    if not separator:
        return
    if re.search(r"[\s'\"<>]", rest):
        raise ConfigError(
            f"{uri.partition('://')[0]}://***: a blank or a quote in the address; write it as %20, %27 or %22"
        )
    user, separator, host = rest.partition("@")
    if separator and ("@" in re.split(r"[?#]", host)[0] or "/" in user or "?" in user or "#" in user):
        raise ConfigError(f"{mask_secrets(uri)}: user and host cannot be told apart; {remedy}")
    try:
        _ = urlsplit(uri).port
    except ValueError:
        raise ConfigError(f"{mask_secrets(uri)}: the port is no number from 0 to 65535; {remedy}") from None


def _mask_address(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    user, separator, host = rest.rpartition("@")
    if separator and ":" in user:
        name = user.partition(":")[0]
        rest = f"{name if _NAME.fullmatch(name) else '***'}:***@{host}"
    elif separator and (scheme.startswith("http") or not _NAME.fullmatch(user)):
        # the @ may belong to a query, then no part of the address is known to be public
        rest = f"***@{host}" if _NAME.fullmatch(user) else "***"
    place, hash_mark, fragment = rest.partition("#")
    return f"{scheme}://{_mask_query(place)}{hash_mark}{_mask_query(fragment)}"


def _mask_query(text: str) -> str:
    place, mark, query = text.partition("?")
    masked = "&".join(map(_mask_pair, query.split("&"))) if mark else ""
    return f"{'***' if '=' in place else place}{mark}{masked}"


def _mask_pair(pair: str) -> str:
    key, equals, value = pair.partition("=")
    if not pair or (equals and unquote(key) in PUBLIC_KEYS) or value == "***":
        return pair
    return f"{key}=***" if equals else "***"
