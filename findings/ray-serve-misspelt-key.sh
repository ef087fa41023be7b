#!/usr/bin/env bash
# Ray Serve drops a misspelt key of an autoscaling config, and refuses one of a deployment.
#
# Seen with: ray 2.60.0.
# One would guess: both are checked alike. serve.deployment(max_ongoing_request=...) is a TypeError; in
# its autoscaling_config an unknown key is dropped without a word and the default holds: with max_replica
# for max_replicas the deployment never has more than one replica. A config file for `serve deploy` with
# the same key passes Ray's schema, too.
# Output:
#   a deployment's max_ongoing_request=8: TypeError
#   autoscaling_config={'min_replicas': 1, 'max_replica': 8}: max_replicas=1
#   the same in a config file: accepted
set -euo pipefail
# shellcheck source=findings/venv
. "$(dirname "$0")/venv" 'ray[serve]==2.60.0'

python - << 'EOF'
from ray import serve
from ray.serve.schema import ServeDeploySchema


class Model:
    pass


try:
    serve.deployment(max_ongoing_request=8)(Model)
    refused = ""
except TypeError:
    refused = "TypeError"
print("a deployment's max_ongoing_request=8:", refused)

scaling = {"min_replicas": 1, "max_replica": 8}
deployment = serve.deployment(autoscaling_config=scaling)(Model)
most = deployment._deployment_config.autoscaling_config.max_replicas
print(f"autoscaling_config={scaling}: max_replicas={most}")

application = {
    "name": "default",
    "import_path": "module:app",
    "deployments": [{"name": "Model", "autoscaling_config": scaling}],
}
ServeDeploySchema.model_validate({"applications": [application]})
print("the same in a config file: accepted")
assert refused and most == 1, "changed: what Ray Serve does with a key that it does not know"
EOF
