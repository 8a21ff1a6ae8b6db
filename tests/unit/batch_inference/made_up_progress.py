"""The progress of a job on two hosts, made up."""

from rich.console import Console

from lockstep.batch_inference.job_progress import HostProgress, JobProgress

FIRST = HostProgress(rows=300, prompts=140, tokens=60_000, seconds=20.0, pages=900, max_pages=1024, floor=6000.0)


SECOND = HostProgress(rows=200, prompts=100, tokens=50_000, seconds=25.0, max_pages=1024, floor=6000.0, done=True)


JOB = JobProgress(rows=1200, found=200, generations=2, hosts=[FIRST, SECOND], seconds=25.0)


def shown(renderable):
    console = Console(width=100, record=True, file=open("/dev/null", "w", encoding="utf-8"))
    console.print(renderable)
    return console.export_text()
