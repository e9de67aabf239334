"""The app: which pages there are, and beside them the links to the servers that `autotune dashboard` started."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import streamlit as st

from dashboards.asked import asked

# not `pages`: Streamlit would serve a folder of that name by itself, without this file, to whoever comes by a link
PAGES = Path(__file__).parent / "views"
# a name of an icon would be fetched from the icons' makers; the browser is to ask nobody else
ICON = """<svg viewBox="0 0 16 16"><path fill="#0072B2" d="M1 2h4v12H1z"/><path fill="#56B4E9" d="M6 6h4v8H6z"/>
<path fill="#E69F00" d="M11 10h4v4h-4z"/></svg>"""


def answers(address: str) -> bool:
    """Whether a server of this machine takes connections; of one elsewhere nothing is asked."""
    where = urlsplit(address)
    if where.hostname not in ("127.0.0.1", "localhost"):
        return True
    try:
        with socket.create_connection((where.hostname, where.port or 80), timeout=0.3):
            return True
    except OSError:
        return False


def link(name: str, address: str) -> None:
    """To a server beside, or that there is none."""
    if address and answers(address):
        st.link_button(name, address, icon=":material/open_in_new:", width="stretch")
    else:
        st.caption(f"{name} is not running")


st.set_page_config(page_title="autotune", page_icon=ICON, layout="wide")
page = st.navigation(
    [
        st.Page(PAGES / "models.py", title="Models and devices", icon=":material/grid_on:", default=True),
        st.Page(PAGES / "study.py", title="One study", icon=":material/monitoring:"),
        st.Page(PAGES / "compare.py", title="Two plans", icon=":material/compare_arrows:"),
        st.Page(PAGES / "nightly.py", title="Nights", icon=":material/bedtime:"),
        st.Page(PAGES / "published.py", title="Published and ours", icon=":material/menu_book:"),
    ]
)
given = asked()
with st.sidebar:
    # without the word behind it MLflow opens on its pages for language models
    link("MLflow", given.mlflow and f"{given.mlflow}/#/experiments?workflowType=machine_learning")
    link("optuna-dashboard", given.optuna)
    st.caption(f"records: {given.runs}")
page.run()
