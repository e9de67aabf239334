"""Show the classes of a fleet's devices: who measured on them, who measures now, and what was lost."""

import time

import streamlit as st

from autotune.fleet.waiting import read_waiting
from autotune.records.run_dir import RunDir, find_active_process
from dashboards import fleet_devices, page
from dashboards.discovery import Unreadable, relative_name

arguments, index = page.start_page(
    "Fleet", "Devices of each class, from the records of the studies that measured on them."
)
runs = [path for path in index.runs if page.names_class(path)]
results = {relative_name(path, arguments.runs): page.load_study(path) for path in runs}
studies = {name: study.records for name, study in results.items() if not isinstance(study, Unreadable)}
active = {
    relative_name(path, arguments.runs): RunDir(path).lock.stat().st_mtime
    for path in runs
    if find_active_process(path) is not None
}
waits = read_waiting(arguments.runs)
classes = fleet_devices.collect_classes(studies, active, time.time())
if not classes and not waits:
    page.show_missing(
        f"No study on a fleet on record in {arguments.runs}.",
        "autotune tune resnet18 --budget 65% --fleet fleet.yaml --on CLASS",
    )
    st.stop()
if classes:
    page.show_table(fleet_devices.HEAD, fleet_devices.class_rows(classes))
if waits:
    page.show_table(fleet_devices.WAITING_HEAD, fleet_devices.waiting_rows(waits, time.time()))
