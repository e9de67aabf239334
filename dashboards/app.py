"""Start the app: its pages, and links to the servers that `autotune dashboard` started beside it."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import streamlit as st

from dashboards.arguments import parse_arguments

# not `pages`: Streamlit serves a folder of that name by itself, and a direct link to a page would skip this file
PAGES = Path(__file__).parent / "views"
# an icon's name would be fetched from the icons' server; the browser must contact no other host
ICON = """<svg viewBox="0 0 16 16"><path fill="#0072B2" d="M1 2h4v12H1z"/><path fill="#56B4E9" d="M6 6h4v8H6z"/>
<path fill="#E69F00" d="M11 10h4v4h-4z"/></svg>"""


def is_running(address: str) -> bool:
    """Return true if a server of this machine accepts connections; a remote server is assumed to run."""
    url = urlsplit(address)
    if url.hostname not in ("127.0.0.1", "localhost"):
        return True
    try:
        with socket.create_connection((url.hostname, url.port or 80), timeout=0.3):
            return True
    except OSError:
        return False


def show_link(name: str, address: str) -> None:
    """Show a link to a server, or a note that it does not run."""
    if address and is_running(address):
        st.link_button(name, address, icon=":material/open_in_new:", width="stretch")
    else:
        st.caption(f"{name} is not running")


st.set_page_config(page_title="autotune", page_icon=ICON, layout="wide")
page = st.navigation(
    [
        st.Page(PAGES / "models.py", title="Models and devices", icon=":material/grid_on:", default=True),
        st.Page(PAGES / "study.py", title="Study", icon=":material/monitoring:"),
        st.Page(PAGES / "compare.py", title="Compare plans", icon=":material/compare_arrows:"),
        st.Page(PAGES / "nightly.py", title="Nights", icon=":material/bedtime:"),
        st.Page(PAGES / "fleet.py", title="Fleet", icon=":material/lan:"),
        st.Page(PAGES / "published.py", title="Published claims", icon=":material/menu_book:"),
    ]
)
arguments = parse_arguments()
with st.sidebar:
    # without the query MLflow opens its pages for language models
    show_link("MLflow", arguments.mlflow and f"{arguments.mlflow}/#/experiments?workflowType=machine_learning")
    show_link("optuna-dashboard", arguments.optuna)
    st.caption(f"records: {arguments.runs}")
page.run()
