"""Google's command line tool: how it is called, and what its errors mean.

Errors are told apart by the texts that gcloud prints, which were read in its source (core/credentials, core/properties,
api_lib/util/api_enablement, core/exceptions of SDK 528) and in reports of users:

- capacity: https://github.com/hashicorp/terraform-provider-google/issues/21243,
  https://github.com/kubernetes/k8s.io/issues/9834
- quota: https://github.com/marin-community/marin/pull/1612, https://github.com/GoogleCloudPlatform/ai-on-gke/issues/849
- reservation: https://github.com/skypilot-org/skypilot/issues/4579
- name taken: https://github.com/skypilot-org/skypilot/issues/129
- login: https://github.com/kubernetes/kubernetes/issues/96289
- API not enabled: https://github.com/hashicorp/terraform-provider-google/issues/16883
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from lockstep.exits import UNAVAILABLE, UNREACHABLE
from lockstep.json_text import parse_json
from lockstep.launch.backend import LaunchError
from lockstep.launch.tool import Cause, Tool, ToolError

CALL_S: Final = 300.0
"""Seconds that one call may take; creating and deleting are asked for and then polled, so each call is short."""


CAUSES: Final = (
    Cause(
        name="login",
        pattern=r"do(es)? not (currently )?have an(y)? (active account|valid credentials)"
        r"|refreshing (your )?(current )?auth tokens|Reauthentication (failed|required)|invalid_grant",
        summary="gcloud is not logged in, or the login has expired",
        advice="Run: gcloud auth login",
    ),
    Cause(
        name="project",
        pattern=r"required property \[(core/)?project\]|The project property must be set"
        r"|Project '[^']*' not found|CONSUMER_INVALID",
        summary="there is no such project, or none was given",
        advice="Give --project, or run: gcloud config set project PROJECT_ID (gcloud projects list shows yours)",
    ),
    Cause(
        name="api",
        pattern=r"not enabled on project|has not been used in project|SERVICE_DISABLED|accessNotConfigured",
        summary="the project has not enabled the API that this needs",
        advice="Run: gcloud services enable tpu.googleapis.com compute.googleapis.com --project {project}; "
        "then wait a few minutes",
    ),
    Cause(
        name="exists",
        pattern=r"ALREADY_EXISTS|already exists",
        summary="the name is taken",
        advice="Choose another --tpu_name, or delete what has it: launch delete with the same options",
    ),
    Cause(
        name="reservation",
        pattern=r"Insufficient reserved capacity|Reservation not found|reservation .*(not found|does not exist)"
        r"|does not have (enough|sufficient) .*reserv",
        summary="the reservation does not have this slice free",
        advice="See what is reserved (gcloud compute reservations list), end what uses it, or ask for another "
        "--capacity_type: spot or on-demand",
    ),
    Cause(
        name="rate",
        pattern=r"requests per minute|rateLimitExceeded|RATE_LIMIT_EXCEEDED|per minute per (region|user)",
        summary="too many requests were made within a minute",
        advice="Wait a minute and start again",
        code=UNREACHABLE,
    ),
    Cause(
        name="capacity",
        pattern=r"no more capacity in the zone|ZONE_RESOURCE_POOL_EXHAUSTED|enough resources available to fulfill"
        r"|reason: (stockout|resource_availability)|state:STOCKOUT|is currently unavailable in the",
        summary="the zone has no free TPUs of this kind at the moment",
        advice="Try again later, another --zone, a smaller --tpu_type, or another --capacity_type (spot is often free "
        "when on-demand is not; a reservation is sure). Capacity is per zone, even where quota is per region",
        code=UNAVAILABLE,
    ),
    Cause(
        name="quota",
        pattern=r"[Qq]uota limit '|[Qq]uota '[^']*' (exceeded|exhausted)|QUOTA_EXCEEDED|quotaExceeded"
        r"|Insufficient (project )?quota|exceeds? quota|QuotaFailure",
        summary="the project's quota for this kind of TPU is used up, or is 0",
        advice="Ask for more at https://console.cloud.google.com/iam-admin/quotas in project {project} (search TPU; "
        "spot, on-demand and reserved have quotas of their own, and so have the Cloud TPU API and Compute Engine), "
        "use a smaller --tpu_type, or delete slices that you no longer need",
    ),
    Cause(
        name="type",
        pattern=r"could not be found in the zonal accelerator configurations|was not found in zone"
        r"|requested zone \"[^\"]*\" is not supported|not allowed to use the machine type"
        r"|[Ii]nvalid value for field '[^']*machineType|[Mm]achine type .*does not exist"
        r"|on 'locations/[^']*' \(or it may not exist\)|Location \S+ is not found|/zones/[^/']*' was not found"
        r"|Unknown zone|is not supported for accelerator type",
        summary="zone {zone} does not have this kind of TPU, or is not a zone that this project may use",
        advice="See what a zone has: gcloud compute tpus accelerator-types list --zone {zone}; zones: "
        "https://cloud.google.com/tpu/docs/regions-zones. v5e has no Compute Engine machines: use --backend tpu-vm",
    ),
    Cause(
        name="ssh",
        pattern=r"return code \[255\]|Failed to connect to TPU|\(publickey",
        summary="a machine cannot be reached by ssh",
        advice="See that the network lets port 22 through (gcloud compute firewall-rules list) and that the machine "
        "has an external address, or use --internal_ip from a machine of the same network. A machine that is new may "
        "need a minute",
        code=UNREACHABLE,
    ),
    Cause(
        name="permission",
        pattern=r"PERMISSION_DENIED|Permission denied|Required '[^']*' permission|does not have permission"
        r"|IAM_PERMISSION_DENIED|Insufficient Permission|\bforbidden\b",
        summary="the account may not do this in project {project}",
        advice="Ask an administrator for the roles roles/tpu.admin and roles/compute.instanceAdmin.v1, and "
        "roles/iam.serviceAccountUser on the machines' service account; gcloud auth list shows which account is used",
    ),
    Cause(
        name="gone",
        pattern=r"NOT_FOUND|was not found|not found",
        summary="there is nothing of this name in project {project}, zone {zone}",
        advice="Check --tpu_name, --zone and --project",
    ),
    # gcloud prints the words about connectivity after errors of the service too: this row must come after theirs.
    Cause(
        name="network",
        pattern=r"network connectivity|Could not reach|Unable to find the server|Connection (reset|refused|aborted)"
        r"|Max retries exceeded|did not answer|[Tt]imed? ?out|DEADLINE_EXCEEDED|UNAVAILABLE"
        r"|Temporary failure in name resolution"
        r"|(status|code|HttpError)\W+5\d\d\b|\bINTERNAL(_ERROR)?\b",
        summary="Google's service could not be reached, or failed",
        advice="Check the connection and start again; what was already made is found by its name",
        code=UNREACHABLE,
    ),
)
"""The first whose pattern is found decides."""

TOOL: Final = Tool(
    missing=Cause(
        name="missing",
        summary="there is no gcloud command on this machine",
        advice="Install it: https://cloud.google.com/sdk/docs/install; then run: gcloud init",
    ),
    causes=CAUSES,
    unknown=Cause(
        name="unknown",
        summary="gcloud failed",
        advice="Run the command by hand to see more; gcloud's own text is above",
    ),
    limit_s=CALL_S,
    own_session=False,  # Ctrl-C ends what it waits for
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gcloud:
    """gcloud for one project and zone."""

    project: str = ""  # the project, or empty for that of gcloud's configuration
    zone: str

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    def command(self, *words: str, place: str = "zone") -> list[str]:
        """A command line, with the option ``--zone``, ``--region`` or none, as ``place`` says."""
        options = {"zone": [f"--zone={self.zone}"], "region": [f"--region={self.region}"], "": []}[place]
        return ["gcloud", *words, *options, *([f"--project={self.project}"] if self.project else []), "--quiet"]

    def configured_project(self) -> str:
        """Return the project of gcloud's configuration; Google is not asked."""
        command = ["gcloud", "config", "get-value", "project", "--quiet"]
        if not (project := self.run(command).strip()):
            raise self.error(command, "The required property [project] is not currently set.")
        return project

    def run(self, command: Sequence[str], limit_s: float | None = None) -> str:
        """Run a command line made by `command`, and return what it prints; see `Tool.run`."""
        return TOOL.run(command, self.names, limit_s=limit_s)

    def error(self, command: Sequence[str], text: str) -> ToolError:
        """The error of a command line that printed a text."""
        return TOOL.error(command, text, self.names)

    @property
    def names(self) -> dict[str, str]:
        """The words in braces of `CAUSES`."""
        default = "of gcloud's configuration"
        return {"zone": self.zone or default, "project": self.project or default}

    def read(self, *words: str, place: str = "zone") -> Any:
        """The JSON of a command that describes or lists something; None where there is nothing of that name."""
        try:
            text = self.run([*self.command(*words, place=place), "--format=json"]) or "null"
            return parse_json(text, "what gcloud prints", object, "Run it by hand: what prints beside it?", LaunchError)
        except ToolError as error:
            if error.cause.name == "gone":
                return None
            raise
