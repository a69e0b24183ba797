#!/bin/sh
# Starts an MLflow server that asks for a password. STORE: database URI; ADMIN_PASSWORD: of the user `admin`.
# Users: python -c "import mlflow.server; mlflow.server.get_app_client('basic-auth', URI).create_user('anna', '...')"
set -eu
pip install --quiet --no-cache-dir "mlflow[auth]==3.17.2" "psycopg[binary]==3.3.9"
umask 077
cat > /tmp/basic_auth.ini <<END
[mlflow]
default_permission = EDIT
database_uri = $STORE
admin_username = admin
admin_password = $ADMIN_PASSWORD
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
END
export MLFLOW_AUTH_CONFIG_PATH=/tmp/basic_auth.ini
export MLFLOW_BACKEND_STORE_URI="$STORE"  # by environment: `ps` shows a command line to everybody
exec mlflow server --app-name basic-auth --host 0.0.0.0 --port 5000 --workers 4 \
  --artifacts-destination /artifacts
