"""How busy is the GPU while a command runs? Needs nvidia-smi.

    python results/gpu_busy.py COMMAND ...

Prints the mean of nvidia-smi's utilization, which is the share of time in which any kernel of any process was running,
over the command's run and over each tenth of it.
"""

import statistics
import subprocess
import sys
import threading


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    samples, query = [], ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    try:
        monitor = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        sys.exit(f"no nvidia-smi here ({error})")
    threading.Thread(target=lambda: samples.extend(int(line) for line in monitor.stdout), daemon=True).start()
    status = subprocess.run(sys.argv[1:]).returncode
    monitor.terminate()
    monitor.wait()
    size = max(1, len(samples) // 10)
    parts = [f"{statistics.mean(samples[i:i + size]):.0f}" for i in range(0, len(samples), size)]
    print(f"the GPU was busy {statistics.mean(samples or [0]):.1f} % of the time, {len(samples)} samples; by tenths: "
          + " ".join(parts))
    sys.exit(status)


if __name__ == "__main__":
    main()
