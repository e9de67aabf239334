"""Show run directories and MLflow's records in a Streamlit app; `autotune dashboard` starts it."""
