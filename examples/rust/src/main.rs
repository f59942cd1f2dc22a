//! A client of Slipstream's gateway: it generates, resumes from the middle, and reads an error.
//!
//! Usage: client HOST:PORT. docs/grpc.md says how its stubs are made, and why it is set up as it is.

use std::time::Duration;

use slipstream::gateway_service_client::GatewayServiceClient;
use slipstream::generate_request::Input;
use slipstream::{generate_response, resume_response, GenerateRequest, ResumeRequest, SamplingOptions};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_types::StatusExt;

#[allow(dead_code)] // the stubs hold all messages
mod slipstream {
    tonic::include_proto!("slipstream.v1");
}

type Gateway = GatewayServiceClient<Channel>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).ok_or("give HOST:PORT")?;
    let mut gateway = GatewayServiceClient::new(connect(&address).await?);
    let (session, tokens, text) = generate(&mut gateway).await?;
    println!("text {} {text}", tokens.len());
    println!("rest {}", resume(&mut gateway, session, tokens.len() / 2).await?);
    println!("error {}", refused(&mut gateway).await);
    Ok(())
}

/// tonic has no service configuration and no wait-for-ready: a client tries again until its own time is over.
async fn connect(address: &str) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(Duration::from_secs(20));
    let mut left = 60;
    loop {
        match endpoint.connect().await {
            Err(_) if left > 0 => left -= 1,
            found => return found,
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The deadline is of the call. The session lives on, and a Resume takes it up.
fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs(60));
    request
}

async fn generate(gateway: &mut Gateway) -> Result<(String, Vec<u32>, String), Status> {
    let request = GenerateRequest {
        input: Some(Input::Prompt("def read(self, path):".into())),
        max_tokens: Some(24),
        sampling: Some(SamplingOptions { temperature: Some(0.0), ..Default::default() }),
        ..Default::default()
    };
    let mut stream = gateway.generate(timed(request)).await?.into_inner();
    let (mut session, mut tokens, mut text) = (String::new(), Vec::new(), String::new());
    while let Some(message) = stream.message().await? {
        match message.event {
            Some(generate_response::Event::Started(started)) => session = started.session_id,
            Some(generate_response::Event::Delta(delta)) => {
                tokens.extend(delta.token_ids);
                text.push_str(&delta.text);
            }
            _ => {}
        }
    }
    Ok((session, tokens, text))
}

/// What follows the first tokens of a session.
async fn resume(gateway: &mut Gateway, session_id: String, offset: usize) -> Result<String, Status> {
    let request = ResumeRequest { session_id, offset: offset as u32, ..Default::default() };
    let mut stream = gateway.resume(timed(request)).await?.into_inner();
    let mut text = String::new();
    while let Some(message) = stream.message().await? {
        if let Some(resume_response::Event::Delta(delta)) = message.event {
            text.push_str(&delta.text);
        }
    }
    Ok(text)
}

/// The reason, the field and a number of an error.
async fn refused(gateway: &mut Gateway) -> String {
    let request = GenerateRequest {
        input: Some(Input::Prompt("Hi".into())),
        sampling: Some(SamplingOptions { temperature: Some(-1.0), ..Default::default() }),
        ..Default::default()
    };
    let status = match gateway.generate(timed(request)).await {
        Err(status) => status,
        Ok(stream) => stream.into_inner().message().await.err().unwrap_or(Status::ok("")),
    };
    let (mut reason, mut most, mut field) = (String::new(), String::new(), String::new());
    if let Some(info) = status.get_details_error_info() {
        reason = info.reason;
        most = info.metadata.get("most").cloned().unwrap_or_default();
    }
    if let Some(wrong) = status.get_details_bad_request() {
        field = wrong.field_violations.into_iter().map(|each| each.field).collect();
    }
    format!("{:?} {reason} {field} {most}", status.code())
}
