"""The Streamlit app over MLflow and the run directories; `autotune dashboard` starts it."""
