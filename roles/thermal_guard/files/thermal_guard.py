# SPDX-License-Identifier: Apache-2.0
"""Stops one service when its card or processor has been too hot for too long, and touches nothing else.

Reads a JSON file: {"unit", "uuid", "card_limit_c", "cpu_limit_c", "sustained_s", "every_s"}. Started by systemd.
"""

import glob
import json
import subprocess
import sys
import time

BLIND = {
    "card_temperature_c": "the card's own temperature",
    "card_memory_temperature_c": "the temperature of the card's memory",
    "cpu_temperature_c": "the processor's temperature",
}


class Guard:
    """Decides; knows nothing of programs. A reading that is missing is neither heat nor its end."""

    def __init__(self, config):
        self.config = config
        self.since = None

    def hot(self, readings):
        """Which readings are over their limit, as text."""
        limits = {
            "card_temperature_c": self.config["card_limit_c"],
            "card_memory_temperature_c": self.config["card_limit_c"],
            "cpu_temperature_c": self.config["cpu_limit_c"],
        }
        return [
            f"{name} {readings[name]:g} over {limit:g}"
            for name, limit in limits.items()
            if readings.get(name) is not None and readings[name] > limit
        ]

    def look(self, readings, now):
        """The reason to stop the unit now, or None."""
        reasons = self.hot(readings)
        if not reasons:
            if any(value is not None for value in readings.values()):
                self.since = None
            return None
        if self.since is None:
            self.since = now
        if now - self.since > self.config["sustained_s"]:
            self.since = None
            return "; ".join(reasons)
        return None


def number(text):
    try:
        return float(text.strip())
    except ValueError:
        return None


def read(config, run=subprocess.run, zones="/sys/class/thermal/thermal_zone*", hwmon="/sys/class/hwmon/hwmon*"):
    """All temperatures that this host gives; None where it gives none."""
    readings = dict.fromkeys(BLIND)
    query = "--query-gpu=temperature.gpu,temperature.memory"
    try:
        got = run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", config["uuid"]],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        cells = got.stdout.strip().split(",") if got.returncode == 0 else []
        if len(cells) == 2:
            readings["card_temperature_c"] = number(cells[0])
            readings["card_memory_temperature_c"] = number(cells[1])
    except (OSError, subprocess.TimeoutExpired):
        pass
    found = []
    for folder in glob.glob(zones):
        if "cpu" in text_of(folder + "/type").lower() or "pkg" in text_of(folder + "/type").lower():
            found.append(number(text_of(folder + "/temp")))
    for folder in glob.glob(hwmon):
        if text_of(folder + "/name").strip() in ("coretemp", "k10temp", "zenpower"):
            found += [number(text_of(path)) for path in glob.glob(folder + "/temp*_input")]
    values = [value / 1000 for value in found if value is not None]
    readings["cpu_temperature_c"] = max(values) if values else None
    return readings


def text_of(path):
    try:
        with open(path, encoding="ascii", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def status(readings):
    """What the guard sees and what it is blind to."""
    has = [name for name, value in readings.items() if value is not None]
    lacks = [BLIND[name] for name in BLIND if name not in has]
    return {"sensors": has, "blind_to": lacks}


def main(path, once=False):
    with open(path, encoding="utf-8") as handle:
        config = json.load(handle)
    seen = status(read(config))
    print(
        f"guarding {config['unit']}: reads {seen['sensors']}; blind to {seen['blind_to'] or 'nothing'}",
        flush=True,
    )
    if once:
        print(json.dumps(seen))
        return 0
    guard = Guard(config)
    while True:
        reason = guard.look(read(config), time.monotonic())
        if reason:
            print(f"stopping {config['unit']}: {reason} for more than {config['sustained_s']:g} s", flush=True)
            subprocess.run(["systemctl", "stop", config["unit"]], check=False)
        time.sleep(config["every_s"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--status" in sys.argv[2:]))
