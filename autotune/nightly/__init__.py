"""The nightly job: champions verified beside plain eager, refined, replaced after two nights, regressions told with a cause."""
