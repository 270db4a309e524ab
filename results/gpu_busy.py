"""How busy is the GPU while a command runs? Needs nvidia-smi.

    python results/gpu_busy.py COMMAND ...

Prints what the command prints. Before each line stands the mean of nvidia-smi's utilization since the line before: the
share of time in which any kernel of any process was running.
"""

import statistics
import subprocess
import sys
import threading


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    samples, query = [], ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    try:
        monitor = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        sys.exit(f"no nvidia-smi here ({error})")
    threading.Thread(target=lambda: samples.extend(int(line) for line in monitor.stdout), daemon=True).start()
    command = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
    seen = 0
    for line in command.stdout:
        since, seen = samples[seen:], len(samples)
        print(f"{statistics.mean(since or [0]):3.0f} % of {len(since)} | {line}", end="", flush=True)
    status = command.wait()
    monitor.terminate()
    monitor.wait()
    print(f"the GPU was busy {statistics.mean(samples or [0]):.1f} % of the time, {len(samples)} samples")
    sys.exit(status)


if __name__ == "__main__":
    main()
