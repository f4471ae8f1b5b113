"""Monitors of devices: every form that nvidia-smi, gpustat and rocm-smi print, as series of each device."""

from __future__ import annotations

import calendar
import json

import pytest
from llmconsole.capsules.importers import EvidenceError, recognise
from llmconsole.capsules.importers.jobs import jobs

from .conftest import Imports, notes, values

MIB = 2**20
AT = float(calendar.timegm((2026, 11, 30, 7, 25, 0)))

TABLE = """\
Mon Nov 30 07:25:00 2026
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.104.05             Driver Version: 535.104.05   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |                    0 |
| N/A   35C    P0             412W / 700W |  61440MiB / 81559MiB |     98%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  | 00000000:3B:00.0 Off |                    0 |
| N/A   ERR!   P0              N/A / 700W |      3MiB / 81559MiB |      0%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+

+---------------------------------------------------------------------------------------+
| Processes:                                                                            |
|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |
|        ID   ID                                                             Usage      |
|=======================================================================================|
|    0   N/A  N/A   1234567      C   /usr/bin/python3.11                       61400MiB |
|    0   N/A  N/A      4242      C   ...forgotten/jupyter lab                     24MiB |
+---------------------------------------------------------------------------------------+
"""
OLD = """\
Mon Nov 30 07:25:00 2026
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.67       Driver Version: 418.67       CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  GeForce RTX 208...  Off  | 00000000:02:00.0  On |                  N/A |
| 41%   67C    P2   249W / 250W |  10806MiB / 11019MiB |    100%      Default |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
|    0      1166      G   /usr/lib/xorg/Xorg                            18MiB |
|    0     20417      C   python                                     10777MiB |
+-----------------------------------------------------------------------------+
"""
REPORT = """\

==============NVSMI LOG==============

Timestamp                                 : Mon Nov 30 07:25:00 2026
Driver Version                            : 535.104.05
CUDA Version                              : 12.2

Attached GPUs                             : 2
GPU 00000000:19:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Product Brand                         : NVIDIA
    FB Memory Usage
        Total                             : 81920 MiB
        Reserved                          : 615 MiB
        Used                              : 40960 MiB
        Free                              : 40345 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
        Used                              : 1 MiB
        Free                              : 131071 MiB
    Utilization
        Gpu                               : 87 %
        Memory                            : 44 %
    Temperature
        GPU Current Temp                  : 61 C
        GPU T.Limit Temp                  : N/A
    GPU Power Readings
        Power Draw                        : 311.20 W
        Current Power Limit               : 400.00 W
    Processes
        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : 777
            Type                          : C
            Name                          : python
            Used GPU Memory               : 40900 MiB

GPU 00000000:3B:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    FB Memory Usage
        Total                             : 81920 MiB
        Used                              : 2 MiB
    Utilization
        Gpu                               : 0 %
    Processes                             : None
"""


def series(capsule, device: int) -> dict[str, list[float]]:
    return {
        name: [value for _, value in values(capsule, name, rank=device)]
        for name in ("memory_device_used", "gpu_utilization", "gpu_power", "gpu_temperature")
    }


def listed(capsule) -> dict[int, list[dict]]:
    return {each["rank"]: each["other_processes"] for each in capsule.records("events")}


class TestTable:
    def test_a_table_again_and_again(self, imported: Imports):
        later = TABLE.replace("07:25:00", "07:25:05").replace("61440MiB", "61441MiB").replace(" 98%", "  7%")
        capsule = imported(TABLE + later, name="nvidia-smi.txt")
        assert series(capsule, 0) == {
            "memory_device_used": [61440 * MIB, 61441 * MIB],
            "gpu_utilization": [0.98, 0.07],
            "gpu_power": [412.0, 412.0],
            "gpu_temperature": [35.0, 35.0],
        }
        assert series(capsule, 1) == {
            "memory_device_used": [3 * MIB, 3 * MIB],
            "gpu_utilization": [0.0, 0.0],
            "gpu_power": [],
            "gpu_temperature": [],
        }
        assert capsule.scalars("gpu_power", rank=0).time.tolist() == [AT, AT + 5]
        assert capsule.manifest.placement["ranks"][1] == {
            "rank": 1,
            "name": "NVIDIA H100 80GB HBM3",
            "memory": 81559 * MIB,
        }
        assert capsule.manifest.environment.driver == "535.104.05"

    def test_who_is_on_a_device_is_said_once_where_it_does_not_change(self, imported: Imports):
        capsule = imported(TABLE + TABLE.replace("07:25:00", "07:25:05"), name="nvidia-smi.txt")
        (event,) = capsule.records("events")
        assert event["t"] == AT
        assert event["other_processes"] == [
            {"pid": 1234567, "bytes": 61400 * MIB, "name": "/usr/bin/python3.11", "type": "C"},
            {"pid": 4242, "bytes": 24 * MIB, "name": "...forgotten/jupyter lab", "type": "C"},
        ]

    def test_an_old_driver_without_partitions_and_with_a_fan(self, imported: Imports):
        capsule = imported(OLD, name="smi")
        assert series(capsule, 0) == {
            "memory_device_used": [10806 * MIB],
            "gpu_utilization": [1.0],
            "gpu_power": [249.0],
            "gpu_temperature": [67.0],
        }
        assert [each["pid"] for each in listed(capsule)[0]] == [1166, 20417]

    def test_a_training_log_that_shows_the_table_stays_a_training_log(self, imported: Imports):
        capsule = imported(f"{TABLE}step 1 loss 2.5\n{TABLE}step 2 loss 2.25\n")
        assert values(capsule, "loss") == [(1, 2.5), (2, 2.25)]
        assert values(capsule, "memory_device_used", rank=0) == [(1, 61440.0 * MIB)]
        assert [each["pid"] for each in listed(capsule)[0]] == [1234567, 4242]
        assert capsule.manifest.placement["ranks"][0]["memory"] == 81559 * MIB

    def test_a_table_is_no_step_where_logs_continue_one_another(self, tmp_path):
        for name, steps in (("run.log", range(1, 100)), ("run.log.2", range(90, 200))):
            (tmp_path / name).write_text(TABLE + "".join(f"step {step} loss 2.5\n" for step in steps))
        ((job,), _) = jobs(sorted(tmp_path.iterdir()))
        assert [each.name for each in job.files] == ["run.log", "run.log.2"]

    @pytest.mark.parametrize(
        "rows",
        [
            "|   0  NVIDIA GeForce RTX 4080      WDDM  |   00000000:01:00.0  On |                  N/A |\n"
            "| 30%   45C    P8              15W / 320W |    1234MiB /  16376MiB |      5%      Default |\n",
            "|   0  NVIDIA B200                    On  |   00000000:1B:00.0 Off |                    0 |\n"
            "| N/A   45C    P0             15W / 1000W |    1234MiB / 183359MiB |      5%      Default |\n",
            "|   0  Tesla K80           Off  | 0000:05:00.0     Off |                    0 |\n"
            "| N/A   45C    P0    15W / 149W |   1234MiB / 11439MiB |      5%      Default |\n",
        ],
    )
    def test_the_widths_of_other_versions(self, imported: Imports, rows: str):
        capsule = imported(f"| NVIDIA-SMI 1.2.3    Driver Version: 1.2.3 |\n{rows}+-----+\n", name="smi")
        assert series(capsule, 0) == {
            "memory_device_used": [1234 * MIB],
            "gpu_utilization": [0.05],
            "gpu_power": [15.0],
            "gpu_temperature": [45.0],
        }

    def test_partitions_of_a_device_are_no_devices(self, imported: Imports):
        capsule = imported(
            "| NVIDIA-SMI 525.85.12    Driver Version: 525.85.12    CUDA Version: 12.0     |\n"
            "|   0  NVIDIA A100-SXM...  On   | 00000000:36:00.0 Off |                   On |\n"
            "| N/A   29C    P0    62W / 400W |    500MiB / 40960MiB |     N/A      Default |\n"
            "| MIG devices:                                                                |\n"
            "|  0    1   0   0  |     25MiB / 40192MiB | 42      0 |  3   0    2    0    0 |\n"
            "|  No running processes found                                                 |\n",
            name="smi",
        )
        assert series(capsule, 0)["memory_device_used"] == [500 * MIB]
        assert capsule.ranks == [0] or list(capsule.ranks) == [0]

    def test_the_real_log_that_begins_with_a_table(self, imported: Imports, real):
        capsule = imported(*(real / "text_logs" / "modded-nanogpt").iterdir())
        assert len(values(capsule, "loss")) > 10


class TestColumns:
    def test_dmon_with_date_and_memory(self, imported: Imports):
        capsule = imported(
            "#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk     fb   bar1\n"
            "#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %      %      %    MHz    MHz     MB     MB\n"
            " 20261130   07:25:00      0    311     61     58     87     44      0      0   1593   1410  40960      1\n"
            " 20261130   07:25:00      1     60     33      -      0      0      0      0   1593    210      2      1\n"
            " 20261130   07:25:01      0    305     61     58     85     41      0      0   1593   1410  40960   "
            "   1\n",
            name="dmon.log",
        )
        assert series(capsule, 0)["gpu_utilization"] == [0.87, 0.85]
        assert series(capsule, 0)["memory_device_used"] == [40960 * MIB] * 2
        assert series(capsule, 1)["gpu_power"] == [60.0]
        assert capsule.scalars("gpu_power", rank=0).time.tolist() == [AT, AT + 1]

    def test_dmon_repeats_its_header(self, imported: Imports):
        head = "# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk\n"
        head += "# Idx     W     C     C     %     %     %     %   MHz   MHz\n"
        capsule = imported((head + "    0    43    35     -    12     0     0     0   877   135\n") * 3, name="x.txt")
        assert series(capsule, 0)["gpu_utilization"] == [0.12] * 3

    def test_pmon_lists_processes(self, imported: Imports):
        capsule = imported(
            "# gpu         pid   type     fb     sm    mem    enc    dec    command\n"
            "# Idx           #    C/G     MB      %      %      %      %    name\n"
            "    0       1234     C    9000     97     40      -      -    python train.py\n"
            "    0       4242     C     512      -      -      -      -    jupyter\n"
            "    1          -     -       -      -      -      -      -    -\n",
            name="pmon.log",
        )
        assert listed(capsule)[0] == [
            {"pid": 1234, "bytes": 9000 * MIB, "name": "python train.py"},
            {"pid": 4242, "bytes": 512 * MIB, "name": "jupyter"},
        ]


class TestQueries:
    def test_units_in_the_cells(self, imported: Imports):
        capsule = imported(
            "timestamp, index, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W], "
            "temperature.gpu\n"
            "2026/11/30 07:25:00.500, 0, NVIDIA L4, 12 %, 1234 MiB, 23034 MiB, 71.50 W, 45\n"
            "2026/11/30 07:25:00.500, 1, NVIDIA L4, [N/A], 1 MiB, 23034 MiB, [Not Supported], 40\n",
            name="gpu.csv",
        )
        assert series(capsule, 0) == {
            "memory_device_used": [1234 * MIB],
            "gpu_utilization": [0.12],
            "gpu_power": [71.5],
            "gpu_temperature": [45.0],
        }
        assert series(capsule, 1)["gpu_utilization"] == []
        assert capsule.scalars("gpu_power", rank=0).time.tolist() == [AT + 0.5]

    def test_units_above_them_and_devices_by_address(self, imported: Imports):
        capsule = imported(
            "pci.bus_id, utilization.gpu [%], memory.free [MiB], memory.total [MiB]\n"
            "00000000:19:00.0, 12, 23000, 23034\n00000000:3B:00.0, 13, 34, 23034\n00000000:19:00.0, 14, 22000, 23034\n",
            name="gpu.csv",
        )
        assert series(capsule, 0)["memory_device_used"] == [34 * MIB, 1034 * MIB]
        assert series(capsule, 1)["gpu_utilization"] == [0.13]

    def test_without_header_the_units_tell(self, imported: Imports):
        capsule = imported("0, 12 %, 3 %, 1234 MiB, 23034 MiB\n1, 14 %, 0 %, 99 MiB, 23034 MiB\n", name="gpu.csv")
        assert series(capsule, 1) == {
            "memory_device_used": [99 * MIB],
            "gpu_utilization": [0.14],
            "gpu_power": [],
            "gpu_temperature": [],
        }
        assert "no header" in notes(capsule)

    def test_numbers_alone_are_not_guessed_at(self, tmp_path):
        (tmp_path / "a.csv").write_text("0, 12, 1234, 23034\n1, 14, 99, 23034\n")
        assert recognise(tmp_path / "a.csv") is None

    def test_compute_apps(self, imported: Imports):
        capsule = imported(
            "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
            "GPU-aa, 1234, python, 9000 MiB\nGPU-aa, 4242, jupyter, 512 MiB\nGPU-bb, 5, python, [N/A]\n",
            name="apps.csv",
        )
        assert [each["bytes"] for each in listed(capsule)[0]] == [9000 * MIB, 512 * MIB]
        assert listed(capsule)[1] == [{"pid": 5, "name": "python"}]


class TestReports:
    def test_the_full_report(self, imported: Imports):
        capsule = imported(REPORT, name="q.txt")
        assert series(capsule, 0) == {
            "memory_device_used": [40960 * MIB],
            "gpu_utilization": [0.87],
            "gpu_power": [311.2],
            "gpu_temperature": [61.0],
        }
        assert series(capsule, 1)["memory_device_used"] == [2 * MIB]
        assert listed(capsule) == {0: [{"pid": 777, "bytes": 40900 * MIB, "name": "python", "type": "C"}]}
        assert capsule.manifest.placement["ranks"][0]["memory"] == 81920 * MIB


class TestGpustat:
    def test_lines_with_colours_power_and_owners(self, imported: Imports):
        capsule = imported(
            "\x1b[1mnode7\x1b(B\x1b[m  Mon Nov 30 07:25:00 2026  535.104.05\n"
            "\x1b[36m[0]\x1b(B\x1b[m \x1b[34mNVIDIA A100-SXM4-80GB\x1b(B\x1b[m |\x1b[31m 61'C\x1b(B\x1b[m, "
            "\x1b[32m 87 %\x1b(B\x1b[m,"
            " 311 / 400 W | 40960 / 81920 MB | me:python/777(40900M) you:jupyter/42(60M)\n"
            "[1] NVIDIA A100-SXM4-80GB | 33°C, 30 %,   0 % |     2 / 81920 MB |\n",
            name="gpustat.log",
        )
        assert series(capsule, 0) == {
            "memory_device_used": [40960 * MIB],
            "gpu_utilization": [0.87],
            "gpu_power": [311.0],
            "gpu_temperature": [61.0],
        }
        assert series(capsule, 1)["gpu_utilization"] == [0.0]
        assert listed(capsule)[0] == [
            {"pid": 777, "bytes": 40900 * MIB, "name": "python", "user": "me"},
            {"pid": 42, "bytes": 60 * MIB, "name": "jupyter", "user": "you"},
        ]

    @pytest.mark.parametrize("indent", [None, 4])
    def test_json_documents_one_after_another_and_a_torn_one(self, imported: Imports, indent: int | None):
        documents = [
            {
                "hostname": "node7",
                "driver_version": "535.104.05",
                "query_time": f"2026-11-30T07:25:0{second}.000000",
                "gpus": [
                    {
                        "index": 0,
                        "uuid": "GPU-aa",
                        "name": "NVIDIA A100",
                        "temperature.gpu": 61,
                        "utilization.gpu": 80 + second,
                        "power.draw": 311,
                        "memory.used": 40960,
                        "memory.total": 81920,
                        "processes": [{"username": "me", "command": "python", "gpu_memory_usage": 40900, "pid": 777}],
                    }
                ],
            }
            for second in (0, 1)
        ]
        text = "\n".join(json.dumps(each, indent=indent) for each in documents)
        capsule = imported(text + '\n{"hostname": "node7", "gpus": [{"ind', name="gpustat.json")
        assert series(capsule, 0)["gpu_utilization"] == [0.8, 0.81]
        assert capsule.scalars("gpu_power", rank=0).time.tolist() == [AT, AT + 1]
        assert len(capsule.records("events")) == 1
        assert "torn" in notes(capsule)


class TestRocm:
    def test_the_lines_of_its_options(self, imported: Imports):
        capsule = imported(
            "======================= ROCm System Management Interface =======================\n"
            "GPU[0]\t\t: GPU use (%): 93\n"
            "GPU[0]\t\t: VRAM Total Memory (B): 68702699520\nGPU[0]\t\t: VRAM Total Used Memory (B): 68000000000\n"
            "GPU[0]\t\t: Temperature (Sensor edge) (C): 41.0\nGPU[0]\t\t: Average Graphics Package Power (W): 90.0\n",
            name="rocm.txt",
        )
        assert series(capsule, 0) == {
            "memory_device_used": [68000000000.0],
            "gpu_utilization": [0.93],
            "gpu_power": [90.0],
            "gpu_temperature": [41.0],
        }

    def test_the_concise_table(self, imported: Imports):
        capsule = imported(
            "======================= ROCm System Management Interface =======================\n"
            "================================= Concise Info =================================\n"
            "GPU  Temp   AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%  \n"
            "0    35.0c  40.0W   800Mhz  1600Mhz  0%   auto  300.0W    5%   77%    \n",
            name="rocm.txt",
        )
        assert (series(capsule, 0)["gpu_utilization"], series(capsule, 0)["gpu_power"]) == ([0.77], [40.0])
        assert values(capsule, "gpu_memory_share", rank=0) == [(0, 0.05)]

    def test_json(self, imported: Imports):
        said = {"GPU use (%)": "12", "VRAM Total Memory (B)": "100", "VRAM Total Used Memory (B)": "40"}
        capsule = imported(json.dumps({"card0": said, "card1": said}), name="rocm.json")
        assert series(capsule, 1)["memory_device_used"] == [40.0]


@pytest.mark.parametrize("text", [TABLE, OLD, REPORT])
def test_a_torn_file_is_read_up_to_the_tear(imported: Imports, tmp_path, text: str):
    for cut in range(700, len(text), 211):
        try:
            capsule = imported(text[:cut], name=f"cut{cut}.txt")
        except EvidenceError:
            continue
        assert all(0 <= value <= 1 for _, value in values(capsule, "gpu_utilization"))
