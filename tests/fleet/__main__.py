# SPDX-License-Identifier: Apache-2.0
"""Command line of the test fleet."""

from __future__ import annotations

import argparse
import os
import sys

from tests.fleet import demo, fleet, hosts, images, machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description="The test fleet on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("images", help="make the host images (localhost/testhost:bookworm and :trixie)")
    commands.add_parser("up", help="start the fleet: hosts, services, engine image, inventory")
    commands.add_parser("demo", help="the whole way: fleet, site.yml twice, report, endpoint")
    commands.add_parser("bare-up", help="start one more host, p100-d, that is bare")
    commands.add_parser("bare-down", help="remove p100-d")
    commands.add_parser("down", help="remove the fleet")
    commands.add_parser("status", help="say what runs")
    ns = commands.add_parser("ns", help="run a command on this machine where podman sees the fleet")
    ns.add_argument("argv", nargs=argparse.REMAINDER)
    one = commands.add_parser("host", help="start a host of your own, outside the fleet")
    one.add_argument("name")
    one.add_argument("--suite", choices=images.SUITES, default="bookworm")
    one.add_argument("--ip", required=True, help="its address; the network is that /24")
    gone = commands.add_parser("rm", help="remove hosts by name")
    gone.add_argument("names", nargs="+")
    execute = commands.add_parser("exec", help="run a command on a host as root")
    execute.add_argument("host")
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.command == "images":
        images.ensure()
    elif args.command == "up":
        fleet.up()
    elif args.command == "demo":
        demo.main()
    elif args.command == "bare-up":
        fleet.bare_up()
    elif args.command == "bare-down":
        fleet.P100_D.remove()
    elif args.command == "down":
        demo.endpoint().stop()
        fleet.down()
    elif args.command == "status":
        print("\n".join(fleet.status()))
    elif args.command == "ns":
        argv = machine.inside([word for word in args.argv if word != "--"])
        os.execvp(argv[0], argv)
    elif args.command == "host":
        images.ensure((args.suite,))
        hosts.Host(args.name, args.suite, args.ip, network=f"{hosts.LABEL}-{args.ip.split('.')[2]}").start()
    elif args.command == "rm":
        for name in args.names:
            hosts.Host(name, "", "").remove()
    elif args.command == "exec":
        words = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
        argv = hosts.command(args.host, words or ["bash", "-l"], tty=sys.stdin.isatty() and sys.stdout.isatty())
        os.execvp(argv[0], argv)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except machine.FleetError as exc:
        sys.exit(f"fleet: {exc}")
